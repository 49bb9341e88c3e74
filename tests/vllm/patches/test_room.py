"""The room of patches tells the truth: insides of vLLM are met there alone, and each file is kept.

Each file says where the insides are that it is about, in the vLLM that is installed; it is checked
at the start, and has a test.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.project.next.uses import USES

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    import vllm

    from pdconn.vllm.patches import self_test

ROOT = Path(__file__).parents[3]
OURS = ROOT / "pdconn/vllm"
ROOM = OURS / "patches"
MACHINERY = {"__init__", "live", "self_test", "tested_versions"}
VERSIONS = ("0.32.0", "0.33.0")

SIZES = {"max_model_len", "num_gpu_blocks", "hash_block_size", "enable_kv_cache_events"}
"""Numbers and settings that stand from the start, of the manager and its pool."""
OF_OTHERS = {"block_id", "block_pool", "block_size", "blocks", "kv_cache_config", "kv_cache_spec"}
"""Names that descriptions of memory, and our own objects, have as well."""


def insides() -> set[str]:
    """Attributes of vLLM's scheduler, its managers and its pool that pdconn uses."""
    shown = ("vllm.v1.core.sched.output:", "vllm.v1.core.kv_cache_manager:KVCacheBlocks")
    found = {
        name
        for owner, names in USES.items()
        if owner.startswith(("vllm.v1.core.", "vllm.v1.engine.")) and not owner.startswith(shown)
        for name in names.split()
    }
    return found - SIZES - OF_OTHERS


def met(source: str) -> Iterator[str]:
    """Insides that a source uses, private attributes of others, and writes to requests."""
    names = insides()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        is_written = owner == "request" and isinstance(node.ctx, ast.Store | ast.Del)
        if node.attr in names or (is_private and owner not in ("self", "cls")) or is_written:
            yield f"{owner}.{node.attr}"


def test_insides_of_vllm_are_met_in_their_room_alone() -> None:
    others = [path for path in OURS.rglob("*.py") if not path.is_relative_to(ROOM)]
    assert len(others) > 40
    found = {path.name: list(met(path.read_text(encoding="utf-8"))) for path in others}
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.parametrize(
    "source",
    [
        "manager.coordinator",
        "self._pool.touch(blocks)",
        "factory._registry",
        "request.max_tokens = 1",
    ],
)
def test_an_inside_that_is_met_elsewhere_is_named(source: str) -> None:
    assert list(met(source))
    assert len(list(met("".join(p.read_text(encoding="utf-8") for p in ROOM.rglob("*.py"))))) > 60


def files() -> list[str]:
    """Modules of the room that are about an inside."""
    paths = [path for path in ROOM.rglob("*.py") if path.stem not in MACHINERY]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths)


def loaded(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.mark.parametrize("name", files())
def test_a_file_says_where_the_inside_is(name: str) -> None:
    """As a line of the version that is installed; ``make check-next`` looks at the next one's."""
    version = re.sub(r"\+.*", "", vllm.__version__)
    if version not in VERSIONS:
        pytest.skip(f"lines are those of {VERSIONS}, this is {version}")
    sources: dict[str, tuple[int, int]] = loaded(name).SOURCES
    assert sources
    for place, lines in sources.items():
        found: Any = loaded(place.partition(":")[0])
        for part in place.partition(":")[2].split("."):
            found = inspect.getattr_static(found, part)
        seen = first_line(inspect.unwrap(getattr(found, "__func__", found)))
        assert lines[VERSIONS.index(version)] == seen, place


def first_line(found: Any) -> int:
    """The line of ``def`` or ``class``, behind decorators."""
    lines, first = inspect.getsourcelines(found)
    at = next(at for at, line in enumerate(lines) if re.match(r"\s*(async )?(def|class)\b", line))
    return first + at


@pytest.mark.parametrize("name", files())
def test_a_file_says_what_it_changes_how_it_is_checked_and_by_which_test(name: str) -> None:
    module = loaded(name)
    text = inspect.getdoc(module) or ""
    assert re.search(r"^(Nothing is replaced|(Replaced|Written|Used|Read): )", text, re.MULTILINE)
    assert "Checked at the start" in text
    tests = re.findall(r"`(tests/[\w/.]+)`", text)
    assert tests
    for test in tests:
        assert (ROOT / test).exists(), test
    for check in re.findall(r"Checked at the start[^.]*?:func:`(\w+)`", text):
        assert callable(getattr(module, check))


def test_every_check_is_run() -> None:
    checks = {
        found
        for name in files()
        for found in vars(loaded(name)).values()
        if inspect.isfunction(found) and found.__name__.startswith("check_")
        if found.__module__ == name and list(inspect.signature(found).parameters) == ["live"]
    }
    assert len(checks) >= 12
    assert set(self_test._CHECKS) == checks
