"""vLLM's own scheduler over our connector, with no model, no worker and no clock.

A test is the engine core: it calls ``schedule``, holds the step that comes of it in flight as long
as it likes, and lets it be processed.  Several steps can be in flight, as with asynchronous
scheduling and with pipeline parallelism.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    from pdconn.vllm import scheduler as our_scheduler
    from pdconn.vllm.connector import PdconnConnector
    from pdconn.vllm.patches import deferred_frees, failed_loads
    from pdconn.vllm.worker import PdWorker

BLOCK_TOKENS = 16
NUM_BLOCKS = 9
"""One of them is the null block."""


def transfer_config(role: str, *, policy: str = "fail", **extra: Any) -> KVTransferConfig:
    """As ``--kv-transfer-config`` would make it."""
    return KVTransferConfig(
        kv_connector="PdconnConnector",
        kv_connector_module_path="pdconn.vllm",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config=extra,
    )


def store_in(root: Path) -> dict[str, Any]:
    """The setting ``store`` of an engine."""
    root.mkdir(mode=0o700, exist_ok=True)
    return {"root": str(root), "capacity": "1GiB"}


def engine_config(transfer: KVTransferConfig, *, is_async: bool = True, pp: int = 1) -> Any:
    """vLLM's own configuration, of a model that only its length is known of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config: Any = VllmConfig(kv_transfer_config=transfer)
    config.model_config = SimpleNamespace(
        max_model_len=2048,
        enable_sleep_mode=False,
        uses_mrope=False,
        is_encoder_decoder=False,
        runner_type="generate",
        is_diffusion=False,
        supports_multimodal_inputs=False,
        return_sampling_mask=False,
        multimodal_config=None,
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.scheduler_config.async_scheduling = is_async
    config.parallel_config.pipeline_parallel_size = pp
    return config


def cache_config() -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    return KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layers.0"], spec)])


class Engine:
    """A scheduler whose steps stay in flight until :meth:`process`."""

    def __init__(self, config: Any, cache: KVCacheConfig | None = None, **sizes: int) -> None:
        made = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
        cache, sizes = cache or cache_config(), sizes or {"block_size": BLOCK_TOKENS}
        grammars: Any = SimpleNamespace(
            accept_tokens=lambda request, tokens: True, should_advance=lambda request: False
        )
        self.scheduler: Any = made(config, cache, grammars, **sizes)
        self.connector: Any = _ours(self.scheduler.connector)
        self.in_flight: list[Any] = []
        self._chunks: list[set[str]] = []  # requests of which a step computes no last token
        self._numbers = itertools.count()
        hashing = get_hash_fn_by_name("sha256_cbor")
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hashing)
        self._promised: dict[str, int] = {}
        hit = self.connector.get_num_new_matched_tokens

        def matched(request: Any, num_local: int) -> tuple[int | None, bool]:
            promised = self._promised.get(request.request_id, 0)
            return (promised, True) if promised else hit(request, num_local)

        # What a store or a ticket would promise; the blocks for it are vLLM's to choose.
        self.connector.get_num_new_matched_tokens = matched

    def add(
        self, num_tokens: int, *, loads: int = 0, first: int | None = None, **params: Any
    ) -> str:
        """A request arrives, of which ``loads`` tokens will be brought.

        ``first`` is its first token, and the others count on; requests differ without it.
        ``params`` are its ``kv_transfer_params``.
        """
        name = f"r{next(self._numbers)}"
        first = 1000 * int(name[1:]) if first is None else first
        tokens = list(range(first, first + num_tokens))
        extra = {"kv_transfer_params": params} if params else None
        sampling = self.sampling(extra_args=extra)
        request = Request(name, tokens, sampling, None, block_hasher=self._hasher)
        self._promised[name] = loads
        self.scheduler.add_request(request)
        return name

    @staticmethod
    def sampling(**more: Any) -> SamplingParams:
        """Of an answer of 8 tokens."""
        return SamplingParams(max_tokens=8, **more)

    def schedule(self) -> None:
        """One step more is in flight."""
        step = self.scheduler.schedule()
        self.in_flight.append(step)
        requests = self.scheduler.requests
        names = step.num_scheduled_tokens
        self._chunks.append({name for name in names if requests[name].is_prefill_chunk})

    def process(self, reports: KVConnectorOutput | None = None) -> list[Any]:
        """The oldest step in flight has run, and workers report; returns what clients get."""
        step, chunks = self.in_flight.pop(0), self._chunks.pop(0)
        names = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[] if name in chunks else [7] for name in names],
            kv_connector_output=reports,
        )
        answered = self.scheduler.update_from_output(step, output)
        return [one for outputs in answered.values() for one in outputs.outputs]

    def abort(self, name: str) -> None:
        """The client has left."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def blocks(self, name: str) -> set[int]:
        """The blocks that a request has now."""
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return set(ids)

    def close(self) -> None:
        """End its threads."""
        self.scheduler.shutdown()


def _ours(connector: Any) -> Any:
    """Our connector, itself or as the only child of vLLM's MultiConnector."""
    if isinstance(connector, MultiConnector):
        [connector] = connector.sub_connectors
    assert isinstance(connector, PdconnConnector)
    return connector


__all__ = [
    "BLOCK_TOKENS", "Engine", "KVConnectorOutput", "KVOutputAggregator", "KVTransferConfig",
    "ModelRunnerOutput", "PdWorker", "Request", "Scheduler", "cache_config", "deferred_frees",
    "engine_config", "failed_loads", "our_scheduler", "store_in", "transfer_config",
]  # fmt: skip
"""Imported here once, where the warnings of torch and others are caught."""
