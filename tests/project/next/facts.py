"""Describes what pdconn overrides, imports and uses, in the vLLM of this process.

    python -m tests.project.next.facts        prints JSON

Run in a child process with a vLLM of choice on its path, since one process imports one vLLM.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import pkgutil
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.project.next.uses import REPLACED, USES

PACKAGES = ("transport", "registration", "pdconn")
OURS = tuple(
    Path(__file__).parents[3] / "pdconn" / folder for folder in ("vllm", "tools/lab/cpu_engines")
)
"""What vLLM loads of ours."""
MISSING = "missing"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass
class Facts:
    """What one vLLM is to pdconn.

    Attributes:
        version, where: of vLLM.
        modules: ours that were imported.
        broken: ours that were not, and why.
        overridden: what vLLM's base classes say of what ours override, by ``class.name``.
        misfits: overrides that do not take what vLLM passes, and why.
        hooks: what vLLM's base class of connectors offers.
        names: what is imported and used, as described by :func:`described`.
        bodies: digests of the source of what is replaced.
    """

    version: str
    where: str
    modules: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    overridden: dict[str, str] = field(default_factory=dict)
    misfits: dict[str, str] = field(default_factory=dict)
    hooks: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)


def described(owner: Any, name: str) -> str:  # noqa: PLR0911 - a kind each
    """What ``owner.name`` is: its kind, and the signature or the annotation that it has."""
    try:
        found = inspect.getattr_static(owner, name)
    except AttributeError:
        if inspect.isclass(owner):
            return _assigned(owner, name)
        # A module may make its names as they are asked for.
        return "attribute" if inspect.ismodule(owner) and hasattr(owner, name) else MISSING
    if isinstance(found, property | cached_property):
        getter = found.fget if isinstance(found, property) else found.func
        return f"property{_signature(getter)}"
    if isinstance(found, classmethod | staticmethod):
        return f"{type(found).__name__}{_signature(found.__func__)}"
    if inspect.isfunction(found):
        return f"function{_signature(found)}"
    if inspect.isclass(found) or inspect.ismodule(found):
        return "class" if inspect.isclass(found) else "module"
    return _assigned(owner, name, or_else="value") if inspect.isclass(owner) else "value"


def _signature(function: Any) -> str:
    try:
        return _ADDRESS.sub("", str(inspect.signature(function)))
    except ValueError:
        return "(unknown)"


def _assigned(owner: type, name: str, or_else: str = MISSING) -> str:
    """What a class says of an attribute: its annotation, or that a method assigns it."""
    for cls in owner.__mro__:
        annotation = inspect.get_annotations(cls).get(name)
        if annotation is not None:
            plain = isinstance(annotation, str)
            return f"attribute: {annotation if plain else inspect.formatannotation(annotation)}"
        for target, text in _written_to(cls):
            if target == name:
                return f"attribute: {text}" if text else "attribute"
    return or_else


def _written_to(cls: type) -> Iterator[tuple[str, str]]:
    """Names that methods of a class assign to ``self``, with their annotations."""
    if not cls.__module__.startswith("vllm"):
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return
    for node in ast.walk(tree):
        targets: list[Any] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                targets += getattr(target, "elts", [target])
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                is_annotated = isinstance(node, ast.AnnAssign)
                yield target.attr, ast.unparse(node.annotation) if is_annotated else ""


def misfit(ours: type, theirs: type, name: str) -> str | None:
    """Why an override does not take what its base class takes, or None."""
    mine, base = inspect.getattr_static(ours, name), inspect.getattr_static(theirs, name)
    if isinstance(base, property | cached_property):
        is_value = not inspect.isfunction(mine) and not isinstance(mine, classmethod | staticmethod)
        return None if is_value else f"vLLM has a property, ours is a {type(mine).__name__}"
    if isinstance(base, classmethod | staticmethod) or inspect.isfunction(base):
        if type(mine) is not type(base):
            return f"vLLM has a {type(base).__name__}, ours is a {type(mine).__name__}"
        return _refused(getattr(mine, "__func__", mine), getattr(base, "__func__", base))
    return None


def _refused(ours: Any, theirs: Any) -> str | None:
    """Why ``ours`` cannot be called as ``theirs`` can, or None."""
    mine = list(inspect.signature(ours).parameters.values())
    base = list(inspect.signature(theirs).parameters.values())
    kinds = {parameter.kind for parameter in mine}
    named = {parameter.name: parameter for parameter in mine}
    for position, parameter in enumerate(base[1:], start=1):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if parameter.kind not in kinds:
                return f"vLLM takes {parameter}, ours does not"
            continue
        own = named.get(parameter.name)
        if own is None:
            if parameter.VAR_KEYWORD in kinds or parameter.VAR_POSITIONAL in kinds:
                continue
            return f"vLLM passes {parameter.name}, ours does not take it"
        if parameter.kind is not parameter.KEYWORD_ONLY and mine.index(own) != position:
            return f"vLLM's argument {position} is {parameter.name}, ours is {mine[position].name}"
        if parameter.default is not parameter.empty and own.default is own.empty:
            return f"vLLM may leave {parameter.name} out, ours needs it"
    taken = {parameter.name for parameter in base}
    needed = [
        parameter.name
        for parameter in mine[1:]
        if parameter.name not in taken
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    return f"ours needs {', '.join(needed)}, vLLM does not pass it" if needed else None


def overrides(cls: type) -> Iterator[tuple[str, type]]:
    """Names that a class of ours defines and a class of vLLM's too, with the latter."""
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("vllm.")]
    for name in vars(cls):
        if name.startswith("__") and name != "__init__":
            continue
        for base in bases:
            if name in vars(base):
                yield name, base
                break


def imported() -> set[tuple[str, str]]:
    """(module, name) of everything that our sources import from vLLM, wherever in a file."""
    found = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(str(node.module), alias.name) for alias in node.names}
    return found


def sources() -> list[Path]:
    """Files of ours that vLLM loads."""
    return [path for folder in OURS for path in folder.rglob("*.py")]


def _import_all(facts: Facts) -> list[ModuleType]:
    made = []
    for package in PACKAGES:
        top = importlib.import_module(package)
        names = [found.name for found in pkgutil.walk_packages(top.__path__, f"{package}.")]
        for name in names:
            try:
                made.append(importlib.import_module(name))
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                facts.broken[name] = f"{type(error).__name__}: {error}"
    facts.modules = [module.__name__ for module in made]
    return made


def _look_up(path: str) -> tuple[Any, str]:
    """The owner and the name in ``module:name``, ``module:Class.name``; None for no owner."""
    module, _, rest = path.partition(":")
    *owners, name = rest.split(".")
    try:
        found: Any = importlib.import_module(module)
        for owner in owners:
            found = getattr(found, owner)
    except (ImportError, AttributeError):
        return None, name
    return found, name


def gather() -> Facts:
    """The facts of the vLLM on the path."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    facts = Facts(vllm.__version__, str(Path(vllm.__file__).parent))
    for module in _import_all(facts):
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            for name, base in overrides(cls):
                key = f"{cls.__name__}.{name}"
                facts.overridden[key] = described(base, name)
                why = misfit(cls, base, name)
                if why is not None:
                    facts.misfits[key] = why
            for name in getattr(cls, "__abstractmethods__", ()):
                if any(base.__module__.startswith("vllm.") for base in cls.__mro__):
                    facts.misfits[f"{cls.__name__}.{name}"] = "vLLM requires it, ours lacks it"
    facts.hooks = sorted(name for name in vars(KVConnectorBase_V1) if not name.startswith("_"))
    paths = [f"{module}:{name}" for module, name in imported()]
    paths += [f"{owner}.{name}" for owner, names in USES.items() for name in names.split()]
    for path in sorted(paths):
        owner, name = _look_up(path)
        if inspect.ismodule(owner) and not hasattr(owner, name):
            _look_up(f"{owner.__name__}.{name}:x")  # a submodule, which its import makes a name
        facts.names[path] = MISSING if owner is None else described(owner, name)
    for path in REPLACED:
        owner, name = _look_up(path)
        found = getattr(owner, name, None)
        if inspect.isroutine(found):
            text = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(found))))
            facts.bodies[path] = hashlib.sha256(text.encode()).hexdigest()
    return facts


def main() -> int:
    """Print the facts; what libraries print goes to the error output."""
    out, sys.stdout = sys.stdout, sys.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        print(json.dumps(asdict(gather())), file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
