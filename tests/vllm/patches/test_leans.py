"""What is believed of vLLM is checked at the start: each wrong belief refuses the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pdconn.vllm.config import ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from pdconn.vllm.patches import leans
    from tests.fakes.simulated.requests import vllm_request
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape, SimCache

Changes = Callable[[pytest.MonkeyPatch, Any], object]


def manager() -> Any:
    """vLLM's own."""
    return SimCache(CacheShape((GroupShape(8), GroupShape(8, 24)), 20)).manager


def test_the_installed_vllm_is_as_believed() -> None:
    leans.check_leans(manager())


def other_cache_blocks(*args: Any) -> None:
    """Does not begin where the blocks before end."""


def other_schedule(self: Any) -> None:
    """Counts tokens as computed before connectors are asked."""
    self._update_after_schedule(None)
    self._build_kv_connector_meta(None, None)
    self.kv_connector_block_state = None


def other_reset(self: Any) -> None:
    self.clear()


def without(name: str, names: Callable[..., tuple[str, ...]]) -> Callable[..., tuple[str, ...]]:
    return lambda owner, method: tuple(one for one in names(owner, method) if one != name)


WRONG: dict[str, tuple[str, Changes]] = {
    "cached blocks are counted elsewhere": (
        "num_cached_block",
        lambda patch, one: patch.setattr(
            one.coordinator.single_type_managers[0], "num_cached_block", [0]
        ),
    ),
    "caching begins elsewhere": (
        "cache_blocks",
        lambda patch, one: [
            patch.setattr(base, "cache_blocks", other_cache_blocks)
            for base in type(one.coordinator.single_type_managers[0]).__mro__
            if "cache_blocks" in vars(base)
        ],
    ),
    "groups say otherwise that a drafter reads them": (
        "attention_groups",
        lambda patch, one: patch.setattr(
            one.coordinator, "attention_groups", [SimpleNamespace(eagle="no")]
        ),
    ),
    "a reset does not reach the pool": (
        "reset_prefix_cache",
        lambda patch, one: patch.setattr(KVCacheManager, "reset_prefix_cache", other_reset),
    ),
    "tokens in flight are not counted": (
        "num_in_flight_tokens",
        lambda patch, one: patch.setattr(Request, "__init__", other_reset),
    ),
    "requests have no salt": (
        "cache_salt",
        lambda patch, one: patch.setattr(leans, "_names", without("cache_salt", leans._names)),
    ),
    "connectors are asked later": (
        "schedule",
        lambda patch, one: patch.setattr(Scheduler, "schedule", other_schedule),
    ),
}


@pytest.mark.parametrize("belief", WRONG)
def test_a_wrong_belief_is_refused(belief: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, change = WRONG[belief]
    made = manager()
    change(monkeypatch, made)
    with pytest.raises(ConfigError, match=named):
        leans.check_leans(made)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1+cpu", "0.33.0rc1"])
def test_versions_that_were_tested_start(version: str) -> None:
    leans.check_version(version, is_allowed=False)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev"])
def test_others_are_refused_unless_the_user_asks_for_them(version: str) -> None:
    with pytest.raises(ConfigError, match="untested_vllm"):
        leans.check_version(version, is_allowed=False)
    leans.check_version(version, is_allowed=True)


def test_our_fake_of_a_request_has_what_vllms_has() -> None:
    """Of what decides: one that had less was read by a default."""
    real = Request("r", [1, 2], SamplingParams(max_tokens=1), None)
    fake = vars(vllm_request())
    assert set(fake) == leans._OF_REQUESTS
    assert {name: getattr(real, name) for name in fake} == fake
