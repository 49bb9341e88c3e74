"""Optional loads that fail are recomputed under every ``kv_load_failure_policy``.

If the pull of a whole prompt fails, the policy decides.  Loads from a store, and pulls of a prefix
that another engine lends, are optional: they only save time, so no request fails because of them.
But vLLM has one policy per engine::

    update_from_output ─► _handle_failed_recving(names)
                              fail        the client's error, before any connector is asked
                              recompute   no token is computed; the next step frees the blocks,
                                          and looks up the request again

So that method is wrapped, on the scheduler that binds us: requests whose load is optional are
always handled by ``recompute``.

Replaced: ``Scheduler._handle_failed_recving`` of one engine.
Checked at the start by :func:`recompute_failed_loads`, which reads the code, and
:func:`check_failed_loads`.
Tested by ``tests/vllm/patches/test_failed_loads.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from pdconn.vllm.config import ConfigError
from pdconn.vllm.patches.built import scheduler_being_built, unused_name
from pdconn.vllm.patches.live import Live, expect, replaced

SOURCES = {
    "vllm.v1.core.sched.scheduler:Scheduler._handle_failed_recving": (3341, 3688),
    "vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv": (3123, 3467),
}

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
"""Methods of the scheduler, with a name that each must use for a failed load to be computed."""

_TAKES = ["self", "failed_req_ids"]


def recompute_failed_loads(is_optional: Callable[[str], bool]) -> None:
    """Make the scheduler under construction recompute requests whose optional load has failed.

    Args:
        is_optional: whether the load of a request, by its id, is optional.

    Raises:
        ConfigError: no scheduler is under construction, or it handles failed loads differently.
    """
    scheduler = scheduler_being_built()
    seen = "none that binds us" if scheduler is None else missing(type(scheduler))
    if seen is None and not isinstance(vars(scheduler).get(_POLICY), bool):
        seen = f"one that has not set it when it binds connectors: {type(scheduler).__name__}"
    if seen is not None:
        hint = "without it a request would fail because of a store, or of a lent prefix"
        raise ConfigError("vLLM's scheduler", f"one that decides by {_POLICY}", seen, hint)
    deciding = scheduler._handle_failed_recving

    def handle_failed_recving(failed_req_ids: set[str]) -> set[str]:
        optional = {name for name in failed_req_ids if is_optional(name)}
        policy = getattr(scheduler, _POLICY)
        setattr(scheduler, _POLICY, True)
        try:
            rescheduled: set[str] = deciding(optional)
        finally:
            setattr(scheduler, _POLICY, policy)
        return rescheduled | deciding(failed_req_ids - optional)

    scheduler._handle_failed_recving = handle_failed_recving


def missing(made: type) -> str | None:
    """What a class of schedulers lacks for that, or None."""
    deciding = getattr(made, "_handle_failed_recving", None)
    if deciding is None:
        return f"{made.__name__} without _handle_failed_recving"
    takes = list(inspect.signature(deciding).parameters)
    if takes != _TAKES:
        return f"{made.__name__}._handle_failed_recving of {', '.join(takes)}"
    return unused_name(made, _USES)


def check_failed_loads(live: Live) -> None:
    """Check that the policy decides about a request whose load has failed.

    Raises:
        ConfigError: naming the method that works differently.
    """
    from vllm.v1.request import RequestStatus

    scheduler, name = live.scheduler, "Scheduler._handle_failed_recving"
    for is_recomputed in (False, True):
        request = live.new_request(live.tokens)
        failed = {request.request_id}
        request.status, request.num_computed_tokens = RequestStatus.WAITING_FOR_REMOTE_KVS, 1
        scheduler.requests[request.request_id] = request
        with replaced(scheduler, _POLICY, is_recomputed):
            failing = type(scheduler)._handle_failed_recving(scheduler, failed)
        expected = (set(), 0, True) if is_recomputed else (failed, 1, False)
        is_asked_anew = request.request_id in scheduler.failed_recving_kv_req_ids
        seen = failing, request.num_computed_tokens, is_asked_anew
        expect(f"{name}, {_POLICY}={is_recomputed}", expected, seen)
