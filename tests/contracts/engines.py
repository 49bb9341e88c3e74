"""A prefill and a decode engine without a model: vLLM's request models, and our schedulers.

A body goes the way that it goes in ``vllm serve``::

    JSON ─► ChatCompletionRequest ─► to_sampling_params ─► extra_args ─► the scheduler's hooks

The hooks are those of a real ``PdconnConnector`` in its scheduler's role.  Prefill lends from a
real side channel on loopback; decode claims, and what it claims is claimed there, by a socket.
Only tokenizer and model are missing: a prompt's tokens are its bytes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.entrypoints.openai.chat_completion.protocol import (
        ChatCompletionRequest,
        ChatCompletionResponse,
    )
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
    from vllm.renderers.online_renderer import _reused_prompt_token_ids
    from vllm.sampling_params import SamplingParams
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.request import Request, RequestStatus

    from pdconn.vllm.connector import PdconnConnector
    from pdconn.vllm.metadata import PdHandshake

from pdconn.protocol.messages import RankGeometry
from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import ClaimTicket, Command, FailPull
from pdconn.sidechannel.security import Security
from pdconn.tools.lab.ports import free_ports
from tests.fakes.pair import Cache
from tests.fakes.simulated.block_pool import CountedPool
from tests.faults.raw_clients import RawReader
from tests.vllm.lends.scheduler import untried

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HOST = "127.0.0.1"
BLOCK_TOKENS, NUM_BLOCKS = 16, 16
LENT = ([3, 4, 5], [0, 0, 7])
PULLED = ([1, 2, 6], [0, 0, 8])

MODELS: dict[str, Any] = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}
ANSWERS: dict[str, Any] = {COMPLETIONS: CompletionResponse, CHAT: ChatCompletionResponse}


@dataclass(frozen=True, slots=True)
class Decoded:
    """What decode made of a request.

    Attributes:
        tokens: its prompt.
        matched: tokens that the ticket promises, or that fail with it.
        commands: what the scheduler told the workers, until the request had blocks.
    """

    tokens: list[int]
    matched: int
    commands: list[Command]

    @property
    def ticket(self) -> Ticket:
        """The one ticket that was claimed."""
        [claim] = [one for one in self.commands if isinstance(one, ClaimTicket)]
        return claim.ticket

    @property
    def failure(self) -> str:
        """Why the one pull failed."""
        [failed] = [one for one in self.commands if isinstance(one, FailPull)]
        return failed.reason


def transfer_config(role: str, **extra: Any) -> KVTransferConfig:
    """As ``--kv-transfer-config`` would make it."""
    return KVTransferConfig(
        kv_connector="PdconnConnector",
        kv_connector_module_path="pdconn.vllm",
        kv_role=role,
        kv_connector_extra_config=extra,
    )


def engine_config(transfer: KVTransferConfig) -> Any:
    """vLLM's own configuration, of a model that only its length is known of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config: Any = VllmConfig(kv_transfer_config=transfer)
    config.model_config = SimpleNamespace(max_model_len=2048, enable_sleep_mode=False)
    return config


def cache_config() -> KVCacheConfig:
    """Two groups of KV cache, as gpt-oss or Gemma have them: whole, and a window."""
    shape: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": torch.float32,
    }
    full = KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))
    window = KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=16))
    return KVCacheConfig(NUM_BLOCKS, [], [full, window])


def handshake() -> PdHandshake:
    """Of the engine's one worker."""
    memory = Cache("BHLNC", filled=False, groups=2).references
    return PdHandshake(msgspec.msgpack.encode(RankGeometry(0, 0, b"address", memory)), {})


class Engine:
    """One engine: a connector in its scheduler's process, and what the front end hands it."""

    def __init__(self, role: str, connector: Any = None, **extra: Any) -> None:
        self.transfer = transfer_config(role, **extra)
        made = PdconnConnector if connector is None else connector
        config = engine_config(self.transfer)
        self.connector: Any = made(config, KVConnectorRole.SCHEDULER, cache_config())
        self.pool = CountedPool()
        self.connector.bind_gpu_block_pool(self.pool)
        untried(self.connector)
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake()})
        self.asked: list[dict[str, Any]] = []
        self.decoded: list[Decoded] = []
        self._number = 0

    def close(self) -> None:
        self.connector.shutdown()

    def request(self, path: str, body: dict[str, Any], request_id: str = "") -> Any:
        """The engine's request for a body; what vLLM refuses raises as in its server."""
        self.asked.append(body)
        parsed = MODELS[path].model_validate(body)
        tokens = _tokens(parsed)
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        sampling: Any = parsed.to_sampling_params(most, {})
        self._number += 1
        return self.new(tokens, sampling.extra_args, request_id or f"cmpl-{self._number}")

    def new(self, tokens: Sequence[int], extra_args: Any, name: str) -> Any:
        """A request of vLLM's, which reads the parameters from ``extra_args``."""
        sampling = SamplingParams(max_tokens=1, extra_args=extra_args)
        return Request(name, list(tokens), sampling, pooling_params=None)

    def prefill(self, path: str, body: dict[str, Any], request_id: str = "") -> dict[str, Any]:
        """What ``vllm serve`` answers to a router's request to prefill."""
        request = self.request(path, body, request_id)
        return self.answer(path, request, self.lend(request), body)

    def lend(self, request: Any) -> dict[str, Any] | None:
        """Compute a request's prompt; what the connector returns at its end."""
        self.connector.on_new_request(request)
        end_prefill(request)
        kept, params = self.connector.request_finished_all_groups(request, LENT)
        assert kept is False, "blocks are pinned, and the request is over"
        return params  # type: ignore[no-any-return]

    def answer(
        self, path: str, request: Any, params: dict[str, Any] | None, body: dict[str, Any]
    ) -> dict[str, Any]:
        """The body of an answer, by way of vLLM's model of it and JSON."""
        fields: dict[str, Any] = {"model": "m", "choices": [], "kv_transfer_params": params}
        fields["usage"] = {"prompt_tokens": request.num_prompt_tokens, "completion_tokens": 1}
        if body.get("return_token_ids") and path == CHAT:
            fields["prompt_token_ids"] = request.prompt_token_ids
        return json.loads(ANSWERS[path](**fields).model_dump_json())  # type: ignore[no-any-return]

    def decode(self, path: str, body: dict[str, Any]) -> Decoded:
        """What becomes of a router's request to decode."""
        return self.pull(self.request(path, body))

    def pull(self, request: Any) -> Decoded:
        """Take a request as far as its blocks."""
        self.connector.on_new_request(request)
        matched, _ = self.connector.get_num_new_matched_tokens(request, 0)
        blocks = SimpleNamespace(get_block_ids=lambda: PULLED, blocks=())
        self.connector.update_state_after_alloc(request, blocks, matched)
        step = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"other": 1})
        commands = self.connector.build_connector_meta(step).commands
        self.decoded.append(Decoded(request.prompt_token_ids, matched, commands))
        return self.decoded[-1]


def end_prefill(request: Any) -> None:
    """Bring a request to where vLLM has computed its prompt, and its one token."""
    request.num_computed_tokens = request.num_prompt_tokens
    request.append_output_token_ids(0)
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED


@contextmanager
def engines(**extra: Any) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine; prefill lends at a port of its own."""
    [port] = free_ports(1)
    prefill = Engine("kv_producer", side_channel_host=HOST, side_channel_port=port, **extra)
    decode = Engine("kv_consumer", **extra)
    try:
        yield prefill, decode
    finally:
        decode.close()
        prefill.close()


def claim(ticket: Ticket, security: Security | None = None) -> None:
    """Claim a ticket where it says, as a decode rank does; a refusal fails."""
    with RawReader(ticket.port, security, ticket.incarnation, ticket.host) as reader:
        assert reader.welcome.engine_id == ticket.engine_id
        granted = reader.claim(ticket.request_id, ticket.digest(), "pull")
        assert granted.ttl_ms > 0
        reader.done(ticket.request_id, ticket.digest(), "pull")


def _tokens(parsed: Any) -> list[int]:
    """A prompt's tokens: ids as they are, else bytes; of a chat those that prefill sent, if any."""
    if isinstance(parsed, CompletionRequest):
        given: Any = parsed.prompt
        return given if isinstance(given, list) else list(given.encode())
    messages: Any = parsed.messages
    any_id: Any = SimpleNamespace(validate_token_ids=lambda ids, parameter: None)
    reused = _reused_prompt_token_ids(parsed, any_id, messages)
    return reused or list(json.dumps([dict(one) for one in messages]).encode())
