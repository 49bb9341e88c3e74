"""Blocks of a step in flight are freed after that step, whatever the engine's role.

With asynchronous scheduling, and with pipeline parallelism, vLLM schedules a step while the former
one still runs.  A request that is aborted or preempted meanwhile leaves blocks that the running
step writes.  A request that computes may have them at once, since its own step runs later.  A load
may not, since it writes from another stream, or from another host::

    step 1   A writes block 7 ─────────────────────────►│
    A is aborted, block 7 is free
    B gets block 7 for a load          ══ load ══►      │  A's KV over B's

vLLM has a fence for that (``defer_block_free``), which it enables only for the ``kv_role``
kv_consumer or kv_both of the outermost connector.  A store loads with any role, and below
MultiConnector the outer role may differ from ours.  So if we fill blocks of an engine, we enable
its fence.  If steps do not overlap, vLLM frees at once in spite of it.

Written: ``Scheduler.defer_block_free`` of one engine.
Checked at the start by :func:`defer_frees`, which reads the code, and :func:`check_frees`.
Tested by ``tests/vllm/patches/test_deferred_frees.py``.
"""

from __future__ import annotations

from pdconn.vllm.config import ConfigError
from pdconn.vllm.patches.built import scheduler_being_built, unused_name
from pdconn.vllm.patches.live import Live, expect

SOURCES = {
    "vllm.v1.core.sched.scheduler:Scheduler.__init__": (85, 87),
    "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks": (2766, 3084),
    "vllm.v1.core.sched.scheduler:Scheduler._drain_deferred_frees": (2788, 3106),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (2026, 2259),
}

_FENCE = "defer_block_free"

_USES = (
    ("schedule", _FENCE),  # counts the steps that it starts
    ("update_from_output", _FENCE),  # counts those that are over, and frees
    ("_update_after_schedule", _FENCE),  # notes each request's last step
    ("_request_blocks_can_be_freed", _FENCE),
    ("_free_request_blocks", "_request_blocks_can_be_freed"),
    ("_free_blocks", "_free_request_blocks"),  # aborted and finished requests
    ("_preempt_request", "_free_request_blocks"),
)
"""Methods of the scheduler, with a name that each must use for the fence to work."""


def defer_frees() -> None:
    """Enable the fence of the scheduler under construction; called while it binds us.

    Raises:
        ConfigError: no scheduler is under construction, or it has no such fence.
    """
    scheduler = scheduler_being_built()
    seen = "none that binds us" if scheduler is None else missing(type(scheduler))
    if seen is None and _FENCE not in vars(scheduler):
        seen = f"one that has not set it when it binds connectors: {type(scheduler).__name__}"
    if seen is not None:
        hint = "without it a running step may overwrite loaded blocks"
        raise ConfigError("vLLM's scheduler", f"one that frees by {_FENCE}", seen, hint)
    setattr(scheduler, _FENCE, True)


def missing(made: type) -> str | None:
    """What a class of schedulers lacks for the fence, or None."""
    return unused_name(made, _USES)


def check_frees(live: Live) -> None:
    """Check that blocks of a request in flight are freed after its step has been processed.

    Raises:
        ConfigError: naming the method that works differently.
    """
    # No step is scheduled or processed, since all connectors would be called: what these methods do
    # with the fence is checked by their code (:func:`missing`).
    from vllm.v1.core.sched.output import SchedulerOutput

    if not vars(live.scheduler)[_FENCE]:
        return  # blocks of this engine are not loaded
    free = live.pool.get_num_free_blocks()
    with live.computed_request(live.tokens) as request:
        held = len(live.blocks(request))
        live.scheduler.requests[request.request_id] = request
        step = SchedulerOutput.make_empty()
        step.num_scheduled_tokens[request.request_id] = live.tokens
        live.scheduler.sched_step_seq += 1
        live.scheduler._update_after_schedule(step)
        expect("Scheduler._update_after_schedule", live.tokens, request.num_in_flight_tokens)
        live.scheduler._free_request_blocks(request)
        left = live.pool.get_num_free_blocks()
        expect("Scheduler._free_request_blocks, of a step in flight", free - held, left)
        live.scheduler.processed_step_seq += 1
        live.scheduler._drain_deferred_frees()
        left = live.pool.get_num_free_blocks()
        expect("Scheduler._drain_deferred_frees, of a step that is over", free, left)
