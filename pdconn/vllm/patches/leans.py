"""What is believed of vLLM's insides, checked against the live engine at its start.

Each of these is an attribute that would go on being there, or be read by a default, if its meaning
changed, and answers would be wrong without a word.

Source: ``v1/core/kv_cache_coordinator.py``, ``v1/core/single_type_kv_cache_manager.py``,
``v1/core/block_pool.py`` and ``v1/request.py``, 0.32 and 0.33.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from pdconn.vllm.config import ConfigError

TESTED = (0, 32), (0, 34)
"""From the first on, before the second."""

KEY = "untested_vllm"

_ORDER = ("_build_kv_connector_meta", "kv_connector_block_state", "_update_after_schedule")
"""What a step does: connectors are asked, blocks are no longer told, tokens count as computed."""


_OF_REQUESTS = frozenset(
    ("abort_immediately", "cache_salt", "lora_request", "mm_features", "num_in_flight_tokens",
     "prompt_embeds", "resumable", "skip_reading_prefix_cache")
)  # fmt: skip
"""What requests have, and what of a prompt or of its progress would be overlooked without."""


def check_version(version: str, is_allowed: bool) -> None:
    """Refuse a vLLM that was not tested, unless the user asks for it.

    Raises:
        ConfigError: ``version`` is outside of the range.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    first, end = TESTED
    if first <= release < end or is_allowed:
        return
    expected = f"from {first[0]}.{first[1]} on, before {end[0]}.{end[1]}"
    raise ConfigError("vLLM's version", expected, version, f'"{KEY}": true lets it run untested')


def check_leans(manager: Any) -> None:
    """Whether what is read and written of vLLM's block manager still means what it did.

    Raises:
        ConfigError: naming what does not.
    """
    coordinator = manager.coordinator
    for one in coordinator.single_type_managers:
        _expect("num_cached_block of a manager", "a dict", getattr(one, "num_cached_block", None))
        _expect("req_to_blocks of a manager", "a dict", getattr(one, "req_to_blocks", None))
        if "num_cached_block" not in _names(type(one), "cache_blocks"):
            raise _changed("cache_blocks", "one that begins at num_cached_block", "another")
    if isinstance(coordinator, HybridKVCacheCoordinator):
        for group in coordinator.attention_groups:
            if not isinstance(getattr(group, "use_eagle", None), bool):
                raise _changed("attention_groups", "groups with use_eagle", repr(group)[:80])
    if "reset_prefix_cache" not in _names(type(manager), "reset_prefix_cache"):
        raise _changed("reset_prefix_cache", "the pool's", "another")
    if lacking := sorted(_OF_REQUESTS - set(_names(Request, "__init__"))):
        raise _changed("Request", ", ".join(lacking), "none")
    used = _names(Scheduler, "schedule")
    if [name for name in used if name in _ORDER] != list(_ORDER):
        raise _changed("schedule", ", ".join(_ORDER), "another order")


def _expect(name: str, expected: str, seen: object) -> None:
    if not isinstance(seen, dict):
        raise _changed(name, expected, type(seen).__name__)


def _names(owner: type, method: str) -> tuple[str, ...]:
    """Names that a method uses, in order; with those of the methods that it stands before."""
    defined = [vars(base)[method] for base in owner.__mro__ if method in vars(base)]
    written = [inspect.unwrap(one) for one in defined if inspect.isfunction(one)]
    return tuple(name for one in written for name in one.__code__.co_names)


def _changed(name: str, expected: object, seen: object) -> ConfigError:
    hint = "this vLLM works in another way, and pdconn does not know it yet"
    return ConfigError(f"vLLM's {name}", expected, seen, hint)
