"""Blocks of a step in flight are freed once it is over, whatever the engine's role is.

With asynchronous scheduling, and with pipeline parallelism, vLLM schedules a step while the one
before still runs.  A request that is aborted or preempted meanwhile leaves blocks that the running
step will write.  A request that computes may have them at once: its own step runs behind that
one.  A load may not, since it writes from another stream, or from another host::

    step 1   A writes block 7 ─────────────────────────►│
    A is aborted, block 7 is free
    B gets block 7 for a load          ══ load ══►      │  A's KV over B's

vLLM has a fence for that (``defer_block_free``), which it raises for ``kv_role`` kv_consumer and
kv_both alone, of the outermost connector.  A store loads under any role, and below MultiConnector
the role of the outer one need not be ours.  So an engine of which we fill blocks raises the fence
itself.  Where steps do not overlap it frees at once, so it is raised in any mode.

Source: ``Scheduler.__init__``, ``_free_request_blocks`` and ``update_from_output`` in vLLM's
``v1/core/sched/scheduler.py``, 0.32 and 0.33.
"""

from __future__ import annotations

from pdconn.vllm.config import ConfigError
from pdconn.vllm.patches.built import scheduler_being_built, unused_name

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
"""Methods of the scheduler, and a name that each must use for the fence to hold."""


def defer_frees() -> None:
    """Raise the fence of the scheduler that is being built; called while it binds us.

    Raises:
        ConfigError: no scheduler of vLLM's is being built, or it has no such fence.
    """
    scheduler = scheduler_being_built()
    seen = "none that binds us" if scheduler is None else missing(type(scheduler))
    if seen is None and _FENCE not in vars(scheduler):
        seen = f"one that has not set it when it binds connectors: {type(scheduler).__name__}"
    if seen is not None:
        hint = "without it a step that still runs may write over what is loaded"
        raise ConfigError("vLLM's scheduler", f"one that frees by {_FENCE}", seen, hint)
    setattr(scheduler, _FENCE, True)


def missing(made: type) -> str | None:
    """What of the fence a class of schedulers has not got, or None."""
    return unused_name(made, _USES)
