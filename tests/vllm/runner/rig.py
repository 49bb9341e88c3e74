"""The calls that vLLM's model runner V2 makes of a connector, without the runner.

The runner needs a GPU.  Its part for connectors does not: ``ActiveKVConnector`` is vLLM's own,
here over a ``PdconnConnector`` with a ``PdWorker`` of CPU memory, a real lender and a real puller;
bytes move in this process.  :class:`Steps` calls it where ``GPUModelRunner`` does::

    tokens     pre_forward ─► model ─► finish_forward ─► sample ─► post_forward
    drafter    … post_forward(defer_finalize) ─► drafter ─► finalize_step          (vLLM 0.33)
    no tokens  no_forward

The model runs outside a forward context in a full graph, and inside one otherwise.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.forward_context import set_forward_context
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector

    from pdconn.vllm.connector import PdconnConnector
    from pdconn.vllm.metadata import welcome_of

from pdconn.integrity.sums import Terms
from pdconn.lender.server import Lender
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.vllm.prompt import prompt_digest
from tests.fakes.simulated.requests import vllm_request
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport

DEFERS = hasattr(ActiveKVConnector, "finalize_step")
"""Whether this vLLM finalizes a step after the drafter ran, as 0.33 does."""

PROMPT = list(range(4, 53))  # 49 tokens: decode pulls 48 of them, three blocks
BLOCK_TOKENS = 16
NUM_BLOCKS = 8
LENT, PULLED = [3, 5, 6], [1, 2, 4]
_LAYERS = ["model.layers.0.attn", "model.layers.1.attn"]
_PATIENCE_S = 30.0
_HELD_S = 0.3


class Cache:
    """KV memory of two layers as vLLM describes it, layer outermost."""

    def __init__(self, filled: bool) -> None:
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=8, dtype=torch.float32
        )
        page = spec.page_size_bytes
        region = page * NUM_BLOCKS
        size = region * len(_LAYERS)
        placed = KVCacheTensor(size, list(_LAYERS), layer_stride=region, block_stride=page)
        self.config = KVCacheConfig(NUM_BLOCKS, [placed], [KVCacheGroupSpec(list(_LAYERS), spec)])
        self._memory = torch.zeros(size // 4, dtype=torch.float32)
        if filled:
            self._memory.normal_(generator=torch.Generator().manual_seed(7))
        self.layers = {
            name: view.view(NUM_BLOCKS, 2, BLOCK_TOKENS, -1)
            for name, view in zip(_LAYERS, self._memory.chunk(len(_LAYERS)), strict=True)
        }

    def blocks(self, ids: list[int]) -> torch.Tensor:
        """What all layers hold of these blocks."""
        return torch.stack([layer[ids] for layer in self.layers.values()])


class Steps:
    """One engine: ``PdconnConnector`` in both roles, and the runner's calls of the worker's.

    Attributes:
        outputs: what each step told the scheduler, in order; None where there was nothing.
        worker: the connector of the worker's process.
    """

    def __init__(self, role: str, connector: type[PdconnConnector], cache: Cache) -> None:
        self.config = _config(role)
        self.cache = cache
        self.scheduler = connector(self.config, KVConnectorRole.SCHEDULER, cache.config)
        self.worker: Any = connector(self.config, KVConnectorRole.WORKER, cache.config)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        try:
            self.active = get_kv_connector(self.config, cache.layers)
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        assert isinstance(self.active, ActiveKVConnector)
        self.outputs: list[KVConnectorOutput | None] = []

    def scheduled(self, num_tokens: int, **more: Any) -> SchedulerOutput:
        """A step of the scheduler; ``more`` are other fields of its output."""
        output = SchedulerOutput.make_empty()
        output.total_num_scheduled_tokens = num_tokens
        for name, value in more.items():
            assert hasattr(output, name)
            setattr(output, name, value)
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)
        return output

    def forward(
        self,
        output: SchedulerOutput,
        model: Callable[[], object] = lambda: None,
        *,
        full_graph: bool = False,
        drafter: Callable[[], object] | None = None,
    ) -> KVConnectorOutput | None:
        """A step that computes tokens; ``model`` and ``drafter`` are called where they run."""
        batch: Any = SimpleNamespace(idx_mapping=torch.zeros(1), req_ids=["r"], num_tokens=1)
        context = nullcontext() if full_graph else set_forward_context(None, self.config)
        with context:
            self.active.pre_forward(output, batch)
            model()
        self.active.finish_forward()
        if drafter is None:
            told = self.active.post_forward(output.finished_req_ids)
        else:
            told = self.active.post_forward(output.finished_req_ids, defer_finalize=True)
            drafter()
            self.active.finalize_step()
        return self._tell(told)

    def idle(self, output: SchedulerOutput) -> KVConnectorOutput | None:
        """A step that computes nothing."""
        told = self.active.no_forward(output)
        empty = told is EMPTY_MODEL_RUNNER_OUTPUT
        assert empty == (told.kv_connector_output is None)
        return self._tell(told.kv_connector_output)

    def _tell(self, told: KVConnectorOutput | None) -> KVConnectorOutput | None:
        self.outputs.append(told)
        if told is not None:
            self.scheduler.update_connector_output(told)
        return told

    def ask(self, request: Any) -> None:
        """A request with a ticket arrives, is promised its tokens, and gets blocks."""
        self.scheduler.on_new_request(request)
        count, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert (count, is_async) == (len(PROMPT) - 1, True)
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (PULLED,), blocks=())
        self.scheduler.update_state_after_alloc(request, blocks, count)

    def reported(self, field: str) -> list[str]:
        """Requests that the steps so far named in ``field``, each as often as it was named."""
        told = (getattr(output, field) for output in self.outputs if output is not None)
        return [request for requests in told for request in requests or ()]

    def counted(self, name: str) -> int:
        """A counter, over the stats of all steps so far."""
        stats = [output.kv_connector_stats for output in self.outputs if output is not None]
        return sum(one.data["counts"].get(name, 0) for one in stats if one is not None)

    def until(self, is_reached: Callable[[], object], step: Callable[[], object]) -> None:
        """Take steps until ``is_reached``."""
        give_up = time.monotonic() + _PATIENCE_S
        while not is_reached():
            assert time.monotonic() < give_up, "the steps do not get there"
            step()
            time.sleep(0.001)

    def close(self) -> None:
        """End both halves."""
        self.worker.shutdown()
        self.scheduler.shutdown()


class Rig:
    """Prefill, which has lent, and decode, whose steps a test takes."""

    def __init__(self, network: InProcessNetwork, decode: type[PdconnConnector]) -> None:
        self.network = network
        self.prefill = Steps("kv_producer", PdconnConnector, Cache(filled=True))
        self.decode = Steps("kv_consumer", decode, Cache(filled=False))
        handshake = self.prefill.worker.get_handshake_metadata()
        welcome = welcome_of("prefill", "boot-1", {(0, 0): handshake})
        self.lender = Lender(welcome, "127.0.0.1", 0)

    def request(self, name: str, lent: bool = True) -> Any:
        """A decode request with a ticket; one that is not lent will be refused."""
        made = vllm_request(
            request_id=name,
            prompt_token_ids=PROMPT,
            num_prompt_tokens=len(PROMPT),
            num_tokens=len(PROMPT),
            lora_request=None,
            mm_features=[],
        )
        blocks = (BlockList(0, tuple(LENT)),)
        ticket = Ticket(
            "prefill", "boot-1", name, "127.0.0.1", self.lender.port,
            len(PROMPT), prompt_digest(made), blocks,
        )  # fmt: skip
        made.kv_transfer_params = ticket.to_params(1, 1)
        if lent:
            self.lender.lend(name, ticket.digest(), 60.0)
        return made

    def is_pulled(self) -> bool:
        """Whether decode holds what prefill lent."""
        theirs, ours = self.prefill.cache.blocks(LENT), self.decode.cache.blocks(PULLED)
        return bool(torch.equal(theirs, ours))

    def is_reading(self, seconds: float = _HELD_S) -> bool:
        """Whether a read is under way, or gets under way within ``seconds``."""
        give_up = time.monotonic() + seconds
        while not self.network.in_flight() and time.monotonic() < give_up:
            time.sleep(0.001)
        return bool(self.network.in_flight())

    def to_sum(self) -> Any:
        """What prefill's scheduler asks of its workers after a request ended."""
        return Terms("r", len(PROMPT), False), (BlockList(0, tuple(LENT)),)

    def close(self) -> None:
        """End everything."""
        self.network.script = None
        self.network.release_held()
        self.decode.close()
        self.lender.close()
        self.prefill.close()


@contextmanager
def rig(
    monkeypatch: pytest.MonkeyPatch, decode: type[PdconnConnector] = PdconnConnector
) -> Iterator[Rig]:
    """A rig whose decode engine has this connector."""
    from pdconn.vllm import worker

    network = InProcessNetwork()
    stage = SimpleNamespace(rank_in_group=0, world_size=1)
    monkeypatch.setattr(worker, "get_pp_group", lambda: stage)
    monkeypatch.setattr(worker, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(
        worker,
        "open_transport",
        lambda settings, config, name, *, lends: InProcessTransport(network, name),
    )
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    both = Rig(network, decode)
    try:
        yield both
    finally:
        both.close()


def _config(role: str) -> VllmConfig:
    """vLLM's own configuration, of a model that only its shape is known of."""
    transfer = KVTransferConfig(
        kv_connector="PdconnConnector", kv_connector_module_path="pdconn.vllm", kv_role=role
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config: Any = VllmConfig(kv_transfer_config=transfer)
    config.cache_config.kv_cache_layout = "LBHNC"
    config.load_config.load_format = "dummy"
    config.model_config = SimpleNamespace(
        model="tiny",
        seed=0,
        dtype=torch.float32,
        use_mla=False,
        enable_sleep_mode=False,
        max_model_len=2048,
        hf_text_config=SimpleNamespace(num_key_value_heads=2),
        model_arch_config=SimpleNamespace(per_layer_overrides=None),
        get_total_num_kv_heads=lambda: 2,
    )
    return config  # type: ignore[no-any-return]
