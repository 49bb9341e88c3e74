"""Weights that change under a running engine, as far as that can be seen.

A trainer or an operator changes them in the workers, and reaches those through the engine core::

    /update_weights, /collective_rpc, LLM.collective_rpc, LLM.apply_model
        └─► EngineCore.collective_rpc(method) ──► every worker
                       └─► our scheduler: what was computed before is of other weights

vLLM has no hook for it, so we stand in front of that method.  Any call that is not known to leave
weights alone counts as one that changes them: an extension of workers may call its own what it
likes.  The engine core's thread makes the call, so no step is scheduled meanwhile.

Not seen is what goes past the engine core: a worker that is held in the same process and changed
there (``llm_engine.model_executor``).  docs/operations.md says so.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from pdconn.vllm.config import ConfigError

log = logging.getLogger(__name__)

_HARMLESS = frozenset(
    {
        "check_health",
        "compute_weight_checksums",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "profile",
        "release_late_interaction_query_cache",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Calls of vLLM that leave weights as they are, in 0.32 and 0.33."""

_TAKES = ["self", "method", "timeout", "args", "kwargs"]
"""What ``EngineCore.collective_rpc`` takes."""


class Watcher(Protocol):
    """Is told of calls that may change weights."""

    def weights_changed(self, method: str) -> None:
        """A call of this name is about to be made."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_updates(watcher: Watcher) -> None:
    """Tell ``watcher`` of calls of this process's engine cores, as long as it lives.

    Raises:
        ConfigError: this vLLM's engine core makes them in another way.
    """
    from vllm.v1.engine.core import EngineCore

    calling = EngineCore.collective_rpc
    if not hasattr(calling, "pdconn"):
        if list(inspect.signature(calling).parameters) != _TAKES:
            seen = str(inspect.signature(calling))
            hint = "weights that change under an engine would not be seen"
            raise ConfigError("EngineCore.collective_rpc", ", ".join(_TAKES), seen, hint)
        EngineCore.collective_rpc = _watched(calling)
    _watchers.add(watcher)


def _watched(calling: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(calling)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        if not (isinstance(method, str) and method in _HARMLESS):
            for watcher in list(_watchers):
                watcher.weights_changed(name)
        return calling(self, method, *args, **kwargs)

    collective_rpc.pdconn = True  # type: ignore[attr-defined]
    return collective_rpc
