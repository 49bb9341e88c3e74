"""``make check-next`` notices what it is for, and says so when it cannot tell."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.project.next import compare
from tests.project.next.__main__ import ROOT, check, facts_of
from tests.project.next.compare import Outcome
from tests.project.next.facts import Facts, described, misfit, overrides, sources
from tests.project.next.tree import NotHad, download, environment, installed_vllm, obtain
from tests.project.next.uses import REPLACED, USES

ASKED = os.environ.get("PDCONN_CHECK_NEXT")
WRITTEN = ("block_pool", "manager", "registry", "scheduler")
LISTED = {name for names in USES.values() for name in names.split()}


@pytest.mark.skipif(ASKED is None, reason="check-next says which vLLM it asked for")
def test_this_is_the_vllm_that_was_asked_for() -> None:
    vllm = pytest.importorskip("vllm")
    assert vllm.__version__ == ASKED


# Signatures


class Base:
    """A class of vLLM, as it was."""

    __module__ = "vllm.base"

    def hook(self, request: int, blocks: int = 0) -> bool:
        raise NotImplementedError

    @classmethod
    def asked(cls, config: int) -> bool:
        raise NotImplementedError

    @property
    def role(self) -> str:
        raise NotImplementedError


class Ours(Base):
    """What overrides it."""

    def hook(self, request: int, blocks: int = 0) -> bool:
        return True

    @classmethod
    def asked(cls, config: int) -> bool:
        return False

    @property
    def role(self) -> str:
        return "any"

    def of_ours(self) -> None:
        """vLLM knows nothing of it."""


def hook_with_one_more(self: Any, request: int, blocks: int = 0, *, sync: bool) -> bool:
    raise NotImplementedError


def hook_with_another_name(self: Any, request: int, ids: int = 0) -> bool:
    raise NotImplementedError


def hook_in_another_order(self: Any, blocks: int, request: int = 0) -> bool:
    raise NotImplementedError


def hook_with_any_other(self: Any, request: int, blocks: int = 0, **more: Any) -> bool:
    raise NotImplementedError


def hook_that_returns_another(self: Any, request: int, blocks: int = 0) -> int:
    raise NotImplementedError


def facts(base: type, ours: type = Ours) -> Facts:
    """As ``gather`` makes them of one class."""
    found = Facts("0", "nowhere", modules=["ours"])
    for name, _ in overrides(ours):
        found.overridden[name] = described(base, name)
        why = misfit(ours, base, name)
        if why is not None:
            found.misfits[name] = why
    return found


def test_what_is_the_same_is_fine() -> None:
    assert [name for name, _ in overrides(Ours)] == ["hook", "asked", "role"]
    outcome = compare.overrides(facts(Base), facts(Base))
    assert (outcome.problems, outcome.notes) == ((), ())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (hook_with_one_more, "hook: vLLM passes sync, ours does not take it"),
        (hook_with_another_name, "hook: vLLM passes ids, ours does not take it"),
        (hook_in_another_order, "hook: vLLM's argument 1 is blocks, ours is request"),
        (hook_with_any_other, "hook: vLLM takes **more: 'Any', ours does not"),
        (property(lambda self: True), "hook: vLLM has a property, ours is a function"),
        (classmethod(hook_with_any_other), "hook: vLLM has a classmethod, ours is a function"),
    ],
    ids=["parameter", "name", "order", "others", "property", "class"],
)
def test_a_changed_signature_is_reported(changed: Any, why: str) -> None:
    theirs = type("Base", (Base,), {"hook": changed})
    outcome = compare.overrides(facts(Base), facts(theirs))
    assert why in outcome.problems
    assert any(each.startswith("hook: was function(self, request") for each in outcome.problems)
    assert "FAILED" in outcome.text(0.0)


def test_an_attribute_where_vllm_calls_a_method_is_reported() -> None:
    """As ``supports_sleep_mode = False`` was, which 0.33 calls."""
    ours = type("Ours", (Base,), {"asked": False})
    outcome = compare.overrides(facts(Base), facts(Base, ours))
    assert "asked: vLLM has a classmethod, ours is a bool" in outcome.problems


def test_a_change_that_ours_take_is_reported_until_a_person_has_looked() -> None:
    now, then = facts(Base), facts(type("Base", (Base,), {"hook": hook_that_returns_another}))
    assert then.misfits == {}
    assert len(compare.overrides(now, then).problems) == 1
    outcome = compare.overrides(now, then, {"hook": "it is true or false all the same"})
    assert outcome.problems == ()
    assert "true or false" in outcome.text(0.0)
    assert compare.stale(now, now, {"hook": "as before"}) == ["hook"]


@pytest.mark.parametrize("change", ["gone", "other", "never there"])
def test_a_changed_name_is_reported(change: str) -> None:
    now = replace(facts(Base), names={"vllm.x:Y.z": "function(self, a)"})
    then = replace(now, names={"vllm.x:Y.z": "function(self, a, b)"})
    if change == "gone":
        then = replace(now, names={"vllm.x:Y.z": "missing"})
    elif change == "never there":
        now = then = replace(now, names={"vllm.x:Y.z": "missing"})
    assert len(compare.names(now, then).problems) == 1


def test_a_body_that_we_replace_is_named() -> None:
    now = replace(facts(Base), bodies={"vllm.x:Y.z": "1"})
    outcome = compare.names(now, replace(now, bodies={"vllm.x:Y.z": "2"}))
    assert not outcome.problems
    assert "vllm.x:Y.z" in outcome.notes[0]


def test_a_module_that_cannot_be_imported_is_reported() -> None:
    now = facts(Base)
    broken = replace(now, modules=[], broken={"ours": "ImportError: no Request"})
    assert compare.imports(now, broken).problems[0] == "ours: ImportError: no Request"


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_a_vllm_with_another_parameter_is_reported(tmp_path: Path) -> None:
    """The installed one, but for a hook of its base class, and a name that is gone."""
    tree = tmp_path / "other"
    package, installed = tree / "vllm", installed_vllm()
    for changed, before, after in (
        (
            "distributed/kv_transfer/kv_connector/v1/base.py",
            'def on_new_request(self, request: "Request")',
            'def on_new_request(self, request: "Request", priority: int)',
        ),
        ("v1/core/block_pool.py", "def touch(", "def touch_all("),
    ):
        _like(installed, package, Path(changed))
        text = (installed / changed).read_text(encoding="utf-8")
        assert text.count(before) == 1
        (package / changed).unlink()
        (package / changed).write_text(text.replace(before, after), encoding="utf-8")
    now, then = facts_of(None), facts_of(tree)
    assert compare.overrides(now, now).problems == ()
    assert compare.names(now, now).problems == ()
    assert (
        "PdconnConnector.on_new_request: vLLM passes priority, ours does not take it"
        in compare.overrides(now, then).problems
    )
    (gone,) = compare.names(now, then).problems
    assert gone.startswith("vllm.v1.core.block_pool:BlockPool.touch: was function(self, ")
    assert gone.endswith("is missing")


def _like(source: Path, made: Path, changed: Path) -> None:
    """Folders on the way to ``changed``, in which all else is a link to ``source``."""
    made.mkdir(parents=True, exist_ok=True)
    first, *rest = changed.parts
    if made.joinpath(first).is_symlink() and rest:
        made.joinpath(first).unlink()
    for each in source.iterdir():
        if not made.joinpath(each.name).exists() and not (each.name == first and rest):
            made.joinpath(each.name).symlink_to(each)
    if rest:
        _like(source / first, made / first, Path(*rest))


# The list of uses


def _attributes() -> Iterator[tuple[str, str, bool]]:
    """(object, attribute, whether it is written to) of every attribute in our sources."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                yield ast.unparse(node.value), node.attr, isinstance(node.ctx, ast.Store)


def test_private_names_of_vllm_are_listed() -> None:
    private = {
        name
        for owner, name, _ in _attributes()
        if name.startswith("_") and not name.startswith("__") and owner not in ("self", "cls")
    }
    assert {"_registry", "_all_token_ids"} <= private
    assert private <= LISTED
    inherited = {name for owner, name, _ in _attributes() if owner == "self"} & LISTED
    assert {"_kv_cache_config", "_histogram_cls"} <= inherited


def test_what_is_replaced_is_listed() -> None:
    """Everything that is assigned on a class, a module, a block pool, a manager or a scheduler."""
    replaced = [
        name
        for owner, name, is_written in _attributes()
        if is_written and (owner[0].isupper() or owner in WRITTEN)
    ]
    assert set(replaced) == {path.rpartition(".")[2] for path in REPLACED}
    assert sorted(set(replaced)) == sorted(replaced), "each in one place"


def test_what_is_listed_is_used() -> None:
    """As an attribute, or by a name in quotes."""
    text = "".join(path.read_text(encoding="utf-8") for path in sources())
    used = {name for _, name, _ in _attributes()} | {"__init__"}
    assert sorted(name for name in LISTED - used if f'"{name}"' not in text) == []


# The wheel


def wheel(requirement: str, folder: Path) -> None:
    """Wheels as vLLM's is, and as those of packages are that it needs."""
    if not requirement.startswith("vllm=="):
        with ZipFile(folder / "needed-1-any.whl", "w") as made:
            made.writestr("needed.py", f"asked = {requirement!r}\n")
        return
    version = requirement.removeprefix("vllm==")
    with ZipFile(folder / f"vllm-{version}-cp38-abi3-any.whl", "w") as made:
        made.writestr("vllm/__init__.py", f"__version__ = {version!r}\n")
        made.writestr("vllm/_C.abi3.so", "for a GPU")
        made.writestr("vllm/csrc/kernel.cuh", "large")
        metadata = f"Name: vllm\nVersion: {version}\nRequires-Dist: needed_x>=2\n"
        made.writestr(f"vllm-{version}.dist-info/METADATA", metadata)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A package with a compiled library."""
    folder = tmp_path / "site-packages/vllm"
    folder.mkdir(parents=True)
    (folder / "_C.abi3.so").write_text("for a CPU", encoding="utf-8")
    return folder


def test_python_files_lie_over_the_installed_libraries(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.project.next.tree._NEEDED", ("needed_x", "pytest"))
    tree, was_there = obtain("9.9.0", tmp_path / "next", fetch=wheel, installed=installed)
    assert not was_there
    assert (tree / "vllm/_C.abi3.so").read_text(encoding="utf-8") == "for a CPU"
    assert not (tree / "vllm/csrc").exists()
    assert (tree / "needed.py").read_text(encoding="utf-8") == "asked = 'needed_x>=2'\n"
    told = "import vllm, importlib.metadata as m; print(vllm.__version__, m.version('vllm'))"
    env = environment(tree, ROOT)
    seen = subprocess.run(
        [sys.executable, "-c", told], env=env, check=True, capture_output=True, text=True
    )
    assert seen.stdout.split() == ["9.9.0", "9.9.0+cpu"]
    shutil.rmtree(installed.parent)
    installed.mkdir(parents=True)
    (installed / "_other.so").write_text("of a later version", encoding="utf-8")
    again, was_there = obtain("9.9.0", tmp_path / "next", fetch=offline, installed=installed)
    assert (again, was_there) == (tree, True)
    assert [path.name for path in tree.rglob("*.so")] == ["_other.so"]


def offline(requirement: str, folder: Path) -> None:
    raise NotHad(f"{requirement}: no network")


def another(requirement: str, folder: Path) -> None:
    wheel("vllm==1.0.0", folder)


def damaged(requirement: str, folder: Path) -> None:
    (folder / "vllm-9.9.0-any.whl").write_bytes(b"PK no more")


@pytest.mark.parametrize("fetch", [offline, another, damaged, lambda requirement, folder: None])
def test_what_cannot_be_had_is_told_and_leaves_nothing(
    fetch: Any, tmp_path: Path, installed: Path
) -> None:
    with pytest.raises(NotHad):
        obtain("9.9.0", tmp_path / "next", fetch=fetch, installed=installed)
    assert list((tmp_path / "next").iterdir()) == []


def test_no_network_is_its_own_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(NotHad, match="pip download failed: ERROR"):
        download("vllm==9.9.0", tmp_path)
    shown: list[Outcome] = []
    assert check("9.9.0", tmp_path / "next", [], lambda outcome, _: shown.append(outcome)) == 2
    (outcome,) = shown
    assert outcome.line == "vLLM 9.9.0 cannot be had"
