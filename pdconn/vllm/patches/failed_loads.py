"""A load that fails and was not asked for is computed, whatever ``kv_load_failure_policy`` says.

A whole prompt is pulled since its client, or a router, said so with a ticket; what follows when
that fails is vLLM's policy.  A store, and a prefix that another engine has lent, only save time,
so a request never fails because of them.  But vLLM has one policy for all of an engine::

    update_from_output ─► _handle_failed_recving(names)
                              fail        the client's error, before any connector is asked
                              recompute   no token is computed; the next step frees the blocks,
                                          and looks up the request anew

So we stand in front of that method, on the scheduler that binds us, and have it decide about the
names that are only to save time as it does under ``recompute``.

Source: ``Scheduler._handle_failed_recving``, ``update_from_output`` and
``_update_waiting_for_remote_kv`` in vLLM's ``v1/core/sched/scheduler.py``, 0.32 and 0.33.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from pdconn.vllm.config import ConfigError
from pdconn.vllm.patches.built import scheduler_being_built, unused_name

_POLICY = "recompute_kv_load_failures"
_FAILED = "failed_recving_kv_req_ids"

_USES = (
    ("update_from_output", "_handle_failed_recving"),
    ("_handle_failed_recving", _POLICY),
    ("_handle_failed_recving", "num_computed_tokens"),  # set back to none
    ("_handle_failed_recving", _FAILED),
    ("_update_waiting_for_remote_kv", _FAILED),
    ("_update_waiting_for_remote_kv", "free"),
)
"""Methods of the scheduler, and a name that each must use for a failed load to be computed."""

_TAKES = ["self", "failed_req_ids"]


def compute_failed_loads(is_to_save_time: Callable[[str], bool]) -> None:
    """Have the scheduler that is being built compute such requests when their loads have failed.

    Args:
        is_to_save_time: whether what the request of this name waits for is only to save time.

    Raises:
        ConfigError: no scheduler of vLLM's is being built, or it decides in another way.
    """
    scheduler = scheduler_being_built()
    seen = "none that binds us" if scheduler is None else missing(type(scheduler))
    if seen is None and not isinstance(vars(scheduler).get(_POLICY), bool):
        seen = f"one that has not set it when it binds connectors: {type(scheduler).__name__}"
    if seen is not None:
        hint = "without it a request would fail because of a store, or of a prefix lent"
        raise ConfigError("vLLM's scheduler", f"one that decides by {_POLICY}", seen, hint)
    deciding = scheduler._handle_failed_recving

    def handle_failed_recving(failed_req_ids: set[str]) -> set[str]:
        computed = {name for name in failed_req_ids if is_to_save_time(name)}
        policy = getattr(scheduler, _POLICY)
        setattr(scheduler, _POLICY, True)
        try:
            rescheduled: set[str] = deciding(computed)
        finally:
            setattr(scheduler, _POLICY, policy)
        return rescheduled | deciding(failed_req_ids - computed)

    scheduler._handle_failed_recving = handle_failed_recving


def missing(made: type) -> str | None:
    """What a class of schedulers does not do as it did, or None."""
    deciding = getattr(made, "_handle_failed_recving", None)
    if deciding is None:
        return f"{made.__name__} without _handle_failed_recving"
    takes = list(inspect.signature(deciding).parameters)
    if takes != _TAKES:
        return f"{made.__name__}._handle_failed_recving of {', '.join(takes)}"
    return unused_name(made, _USES)
