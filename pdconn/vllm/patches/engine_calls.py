"""Notifies of calls that may change weights, before they are made.

A trainer or an operator changes weights in the workers through the engine core::

    /update_weights, /collective_rpc, LLM.collective_rpc, LLM.apply_model
        └─► EngineCore.collective_rpc(method) ──► every worker
                       └─► our scheduler: earlier KV is of other weights

vLLM has no hook for that, so this method is wrapped, and the one by which a trainer gives new
weights a version.  Any method that is not known to keep the weights counts as one that changes
them, since extensions of workers have methods of any name.  The engine core's thread makes the
call, so no step is scheduled meanwhile.

Changes in a worker of the same process (``llm_engine.model_executor``) are not detected, as
docs/operations.md says.

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
"""Methods of vLLM 0.32 and 0.33 that do not change weights."""

_TAKES = {
    "collective_rpc": ["self", "method", "timeout", "args", "kwargs"],
    "set_weight_version": ["self", "weight_version"],
}
"""Parameters of methods of ``EngineCore``."""


_RELOAD = "reload_weights"
"""Reads the model's files again, or those at another path."""


class Watcher(Protocol):
    """Is notified of calls that may change weights."""

    def weights_changed(self, call: str) -> None:
        """The method named ``call`` is about to be called."""

    def weights_reloaded(self, path: str | None, since: float) -> None:
        """The weights were read from ``path``, or from where they were, after ``since``."""

    def weights_named(self, version: str) -> None:
        """A trainer has given the weights a version (``weight_version``)."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_updates(watcher: Watcher) -> None:
    """Notify ``watcher`` of calls of this process's engine cores, as long as it exists.

    Raises:
        ConfigError: the engine core's methods have other parameters in this vLLM.
    """
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore.collective_rpc, "pdconn"):
        for method, takes in _TAKES.items():
            seen = list(inspect.signature(getattr(EngineCore, method)).parameters)
            if seen != takes:
                hint = "changes of weights would not be detected"
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
