"""What vLLM is asked for is what it uses where a backend reads it, and never stops an engine."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.vllm.config import ConfigError
from registration.references import AttentionKind, GroupMemory, build_kv_cache_references
from tests.fakes.layouts import LAYOUTS, described_bytes, layout_memory

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from pdconn.vllm.memory import layout as layout_module
    from pdconn.vllm.memory.layout import report_layout, run_nbytes, wanted_layout
    from tests.vllm.memory.backends import real_backends

ASKED = (None, "auto", "none", *LAYOUTS)
Resolve = Callable[[Any, list[list[str]]], KVCacheLayout]


def config(asked: object = None, mla: bool = False) -> Any:
    transfer = KVTransferConfig(
        kv_connector="PdconnConnector",
        kv_connector_module_path="pdconn.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={} if asked is None else {"layout": asked},
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(use_mla=mla),
        cache_config=SimpleNamespace(kv_cache_layout=None),
    )


def offers() -> dict[str, list[str]]:
    """What workers would report: of each backend, of each two, and of every list thinkable."""
    made = {}
    backends = real_backends()
    assert {"CPU_ATTN", "FLEX_ATTENTION", "FLASH_ATTN"} <= {b.get_name() for b in backends}
    for some in (*((one,) for one in backends), *itertools.combinations(backends, 2)):
        try:
            layouts = get_supported_kv_cache_layouts(some)
        except ValueError:
            continue  # vLLM itself does not start
        made["+".join(one.get_name() for one in some)] = [one.name for one in layouts]
    for length in (1, 2, 3):
        for some_names in itertools.permutations(LAYOUTS, length):
            made["only " + ",".join(some_names)] = list(some_names)
    return made


OFFERS = offers()


def problems(resolve: Resolve) -> Iterator[str]:
    """Keys and backends with which an engine would not start, or not take what it could."""
    for (name, offered), asked, mla in itertools.product(OFFERS.items(), ASKED, (False, True)):
        try:
            resolved = resolve(config(asked, mla), [offered]).name
        except Exception as error:  # noqa: BLE001 - whatever would stop the engine
            yield f"{name}, {asked}: {error}"
            continue
        wanted = asked or "auto"
        if wanted == "auto":
            wanted = "none" if mla else "LBHNC"
        right = wanted if wanted in offered else offered[0]
        if resolved != right:
            yield f"{name}, {asked}, mla {mla}: {resolved}, not {right}"


def test_no_key_and_no_backend_stop_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    assert list(problems(resolve_kv_cache_layout)) == []


def test_the_property_notices_a_preference_that_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: obeyed whatever backends read; or not asked for at all."""

    def forced(made: Any, offered: list[list[str]]) -> KVCacheLayout:
        asked = get_kv_connector_cache_layout(made)
        return KVCacheLayout[asked or offered[0][0]]

    assert any("FLEX_ATTENTION" in problem for problem in problems(forced))
    monkeypatch.setattr("pdconn.vllm.connector.wanted_layout", lambda config: None)
    found = list(problems(resolve_kv_cache_layout))
    assert any("FLASH_ATTN, auto, mla False: LBNHC, not LBHNC" in problem for problem in found)


def test_the_users_environment_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["LBHNC", "LBNHC", "BLHNC"]
    for set_to, asked in itertools.product(names, ASKED):
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", set_to)
        assert resolve_kv_cache_layout(config(asked), [names]).name == set_to


def test_rocm_keeps_its_backends_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ROCM_ATTN`` reads LBHNC, but without its native kernels."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    offered = ["LHBNC", "LBHNC"]
    assert resolve_kv_cache_layout(config(), [offered]).name == "LBHNC"
    rocm = SimpleNamespace(is_rocm=lambda: True)
    monkeypatch.setattr(layout_module, "current_platform", rocm)
    assert resolve_kv_cache_layout(config(), [offered]).name == "LHBNC"
    assert resolve_kv_cache_layout(config("LBHNC"), [offered]).name == "LBHNC"


def test_a_wrong_key_is_named_before_memory_is_laid_out() -> None:
    with pytest.raises(ConfigError, match=r"layout: expected auto .*got 'HND'"):
        get_kv_connector_cache_layout(config("HND"))


def test_an_engine_without_a_model_has_no_preference() -> None:
    made = config()
    made.model_config = None
    assert wanted_layout(made) is None


def cache(layout: str, opaque: bool = False) -> Any:
    """Three layers of 4 heads, 8 tokens a block, 32 bytes a token and head."""
    layers = layout_memory(
        layout, base=1 << 20, num_blocks=5, layers=["a", "b", "c"], num_heads=4,
        block_tokens=8, token_nbytes=32, opaque=opaque,
    )  # fmt: skip
    group = GroupMemory(AttentionKind.FULL, None, 8, layers)
    return build_kv_cache_references([group])


@pytest.mark.parametrize(
    ("layout", "whole", "one_head"),
    [
        ("LBHNC", 4 * 8 * 32, 8 * 32),
        ("BLHNC", 3 * 4 * 8 * 32, 8 * 32),
        ("BHLNC", 3 * 4 * 8 * 32, 3 * 8 * 32),
        ("LBNHC", 4 * 8 * 32, 32),
        ("BLNHC", 3 * 4 * 8 * 32, 32),
        ("LHBNC", 8 * 32, 8 * 32),
    ],
)
def test_runs_are_as_long_as_their_bytes_follow_each_other(
    layout: str, whole: int, one_head: int
) -> None:
    references = cache(layout)
    assert run_nbytes(references, 0) == (whole, one_head)
    for heads, expected in ((range(4), whole), (range(1), one_head)):
        assert counted(references, heads) == expected
    if layout not in ("LBNHC", "BLNHC"):
        assert run_nbytes(cache(layout, opaque=True), 0) == (whole, one_head)


def counted(references: Any, heads: range) -> int:
    """The same by walking over the bytes of the first block, one by one."""
    bytes_of = described_bytes(references)
    ours = sorted(at for at, label in bytes_of.items() if label[2] == 0 and label[3] in heads)
    runs = [1]
    for before, at in itertools.pairwise(ours):
        if at == before + 1:
            runs[-1] += 1
        else:
            runs.append(1)
    return min(runs)


def test_the_start_says_what_is_in_use_and_what_was_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="pdconn.vllm.memory.layout")
    report_layout("auto", "LBHNC", cache("LBHNC"))
    assert "layout LBHNC" in caplog.text
    assert "full_attention 1 KiB, 256 B" in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    report_layout("BHLNC", "LBHNC", cache("LBHNC"))
    assert "layout BHLNC is configured and LBHNC is in use" in caplog.text
