"""vLLM's hooks of a part by itself, with blocks given as ids by group."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.blocks.transferred import TransferBlocks
    from pdconn.vllm.identity.changes import WeightChanges
    from pdconn.vllm.identity.greeting import Greeting
    from pdconn.vllm.scheduler import PdScheduler, SchedulerParts
    from pdconn.vllm.scheduler_part import NOTHING, Matched, SchedulerPart


def every_group(**more: Any) -> Any:
    """vLLM's KV cache configuration, as far as it says which groups are transferred: all."""
    return SimpleNamespace(select_transfer_block_ids=lambda ids: ids, **more)


def blocks_of(ids: tuple[list[int], ...] = ()) -> TransferBlocks:
    """A request's blocks, of an engine that transfers every group."""
    return TransferBlocks(every_group(), ids)


def matched(part: SchedulerPart, request: Any, num_local: int) -> Matched:
    """What vLLM is answered if no other part has an answer."""
    return part.get_num_new_matched_tokens(request, num_local) or NOTHING


def allocated(
    part: SchedulerPart, request: Any, ids: tuple[list[int], ...], num_external: int
) -> None:
    """The request gets blocks; what vLLM does not compute is what ``part`` has promised."""
    is_promised = num_external > 0
    part.update_state_after_alloc(request, blocks_of(ids), num_external, is_promised=is_promised)


def finished(part: SchedulerPart, request: Any) -> None:
    """The request leaves the engine, and was aborted."""
    part.request_finished(request, blocks_of(), 0)


def half_of(parts: SchedulerParts) -> PdScheduler:
    """The connector's half in the scheduler's process, of these parts and of no engine."""
    made = PdScheduler.__new__(PdScheduler)
    made.parts, made._promised, made._config, made._adapters = parts, {}, every_group(), None
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="p"))
    made.weights = WeightChanges(Greeting(config, "boot"), (), lambda: None)
    return made
