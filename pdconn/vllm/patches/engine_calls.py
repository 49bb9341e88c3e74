"""Calls that may change weights are told before they are made.

A trainer or an operator changes weights in the workers, and reaches those through the engine core::

    /update_weights, /collective_rpc, LLM.collective_rpc, LLM.apply_model
        └─► EngineCore.collective_rpc(method) ──► every worker
                       └─► our scheduler: what was computed before is of other weights

vLLM has no hook for it, so we stand in front of that method, and of the one by which a trainer
names the new weights.  Any call that is not known to leave weights alone counts as one that changes
them: an extension of workers may call its own what it likes.  The engine core's thread makes the
call, so no step is scheduled meanwhile.

Not seen is what goes past the engine core: a worker that is held in the same process and changed
there (``llm_engine.model_executor``).  docs/operations.md says so.

Replaced: ``EngineCore.collective_rpc`` and ``EngineCore.set_weight_version``, of all engines.
Checked at the start by :func:`watch_updates`.
Tested by ``tests/vllm/patches/test_engine_calls.py``.
"""

from __future__ import annotations

import functools
import inspect
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from pdconn.vllm.config import ConfigError

SOURCES = {
    "vllm.v1.engine.core:EngineCore.collective_rpc": (1073, 1110),
    "vllm.v1.engine.core:EngineCore.set_weight_version": (1082, 1119),
}

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

_TAKES = {
    "collective_rpc": ["self", "method", "timeout", "args", "kwargs"],
    "set_weight_version": ["self", "weight_version"],
}
"""What methods of ``EngineCore`` take."""


_RELOAD = "reload_weights"
"""Reads the model's files anew, or those of another path."""


class Watcher(Protocol):
    """Is told of calls that may change weights."""

    def weights_changed(self, call: str) -> None:
        """A call of this name is about to be made."""

    def weights_reloaded(self, path: str | None, since: float) -> None:
        """Weights were read from ``path``, or from where they were, after ``since``."""

    def weights_named(self, version: str) -> None:
        """The trainer gave the weights a version (``weight_version``)."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_updates(watcher: Watcher) -> None:
    """Tell ``watcher`` of calls of this process's engine cores, as long as it lives.

    Raises:
        ConfigError: this vLLM's engine core makes them in another way.
    """
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore.collective_rpc, "pdconn"):
        for method, takes in _TAKES.items():
            seen = list(inspect.signature(getattr(EngineCore, method)).parameters)
            if seen != takes:
                hint = "weights that change under an engine would not be seen"
                raise ConfigError(f"EngineCore.{method}", ", ".join(takes), ", ".join(seen), hint)
        EngineCore.collective_rpc = _watched(EngineCore.collective_rpc)
        EngineCore.set_weight_version = _noted(EngineCore.set_weight_version)
    _watchers.add(watcher)


def _watched(calling: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(calling)
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(method, str) and method in _HARMLESS:
            return calling(self, method, timeout, args, kwargs)
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        began = time.time()
        for watcher in list(_watchers):
            watcher.weights_changed(name)
        answers = calling(self, method, timeout, args, kwargs)
        if method == _RELOAD and not args and set(kwargs or ()) <= {"weights_path"}:
            for watcher in list(_watchers):
                watcher.weights_reloaded((kwargs or {}).get("weights_path"), began)
        return answers

    collective_rpc.pdconn = True  # type: ignore[attr-defined]
    return collective_rpc


def _noted(setting: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setting)
    def set_weight_version(self: Any, weight_version: str) -> Any:
        for watcher in list(_watchers):
            watcher.weights_named(weight_version)
        return setting(self, weight_version)

    return set_weight_version
