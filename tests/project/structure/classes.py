"""Count what a reader holds of classes: their attributes, and methods that share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHONS = {"close"}
"""Methods of Python's own interfaces: ``contextlib.closing``."""

_VLLMS = {
    "bind_gpu_block_pool", "bind_kv_cache_manager", "build_connector_meta",
    "get_external_cache_hit_sources", "get_num_new_matched_tokens", "has_pending_push_work",
    "on_new_request", "request_finished", "shutdown", "take_events", "update_connector_output",
    "update_state_after_alloc",
}  # fmt: skip
"""vLLM's hooks of a connector in the scheduler's process, which our parts have by its names."""


@dataclass(frozen=True)
class ClassShape:
    """One class: where it is, what it derives from, its public methods and its attributes."""

    place: str
    bases: tuple[str, ...]
    methods: frozenset[str]
    attributes: frozenset[str]


def read_classes(root: Path, folders: Sequence[str]) -> list[ClassShape]:
    """Every class below ``folders``, also those within functions."""
    found = []
    for path in sorted(p for folder in folders for p in (root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), name)):
            if isinstance(node, ast.ClassDef):
                bases = tuple(base for base in map(_base, node.bases) if base is not None)
                found.append(
                    ClassShape(f"{name}:{node.name}", bases, _methods(node), _attributes(node))
                )
    return found


def shared_names(classes: Sequence[ClassShape], others: int = 2) -> Mapping[str, Sequence[str]]:
    """Public methods whose name ``others`` unrelated classes have as well: name -> the classes.

    Classes of one interface count once: those that derive from one class, or that have every
    method of one Protocol that names the method.  ``close`` is Python's own interface, and
    connectors' hooks are vLLM's.
    """
    owners: defaultdict[str, list[ClassShape]] = defaultdict(list)
    for each in classes:
        for method in each.methods - _PYTHONS - _VLLMS:
            owners[method].append(each)
    by_name = {each.place.partition(":")[2]: each for each in classes}
    protocols = [each for each in classes if "Protocol" in each.bases and each.methods]
    found = {}
    for method, having in sorted(owners.items()):
        families = {_family(each, method, by_name, protocols) for each in having}
        if len(families) > others:
            found[method] = [each.place for each in having]
    return found


def share_of_shared(classes: Sequence[ClassShape], others: int = 2) -> float:
    """Share of all public methods whose name is one of :func:`shared_names`."""
    shared = shared_names(classes, others)
    total = sum(len(each.methods) for each in classes)
    return sum(map(len, shared.values())) / total if total else 0.0


def _family(
    each: ClassShape,
    method: str,
    by_name: Mapping[str, ClassShape],
    protocols: Sequence[ClassShape],
) -> str:
    """The interface that a class's method belongs to, or the class itself."""
    for protocol in protocols:
        if method in protocol.methods and protocol.methods <= each.methods:
            return protocol.place
    for base in each.bases:
        above = by_name.get(base)
        if above is not None and above is not each:
            return _family(above, method, by_name, protocols)
    return each.place


def _base(node: ast.expr) -> str | None:
    if isinstance(node, ast.Subscript):
        return _base(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _methods(node: ast.ClassDef) -> frozenset[str]:
    """Names of public methods; a property reads as an attribute."""
    return frozenset(
        each.name
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and not each.name.startswith("_")
        and not any(
            _base(one) in {"property", "cached_property", "setter"} for one in each.decorator_list
        )
    )


def _attributes(node: ast.ClassDef) -> frozenset[str]:
    """Fields, and what methods assign to ``self``."""
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return frozenset(fields | set(_assigned(node)))


def _assigned(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if (
            isinstance(each, ast.Attribute)
            and isinstance(each.ctx, ast.Store)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        ):
            yield each.attr
