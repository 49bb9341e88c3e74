"""Finds the engines in one text.

    '{"kv_connector": "PdconnConnector", ...}'       the JSON of --kv-transfer-config
    "vllm serve MODEL --kv-transfer-config ..."      a line of a shell
    FILE, FILE#NAME                                  JSON; vLLM's --config file; a script; Compose,
                                                     Kubernetes or other YAML; a systemd unit

A text that mentions a connector in a place that is not understood is refused: it must never be
taken for an engine without a connector.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.given.arguments import CONFIG, TRANSFER, read_arguments, words_of_file
from pdconn.tools.doctor.given.documents import (
    GivenMapping,
    engines_in,
    is_bare_transfer,
    launches_of_unit,
)
from pdconn.tools.doctor.given.given_config import ADDRESSES, AN_ADDRESS, GivenConfig
from pdconn.tools.doctor.given.launch import Launch, launches_of_script
from pdconn.tools.doctor.given.shell import ReadText

_FORMS = "JSON, a file, or a line 'vllm serve ...'"
_SPEAKS_OF_ONE = re.compile(r"kv[-_](?:connector|transfer[-_]config|role)")
_UNIT = re.compile(r"^\s*ExecStart\s*=", re.MULTILINE)
_KEY = re.compile(r"[A-Za-z][\w./-]*\+?")
_SHELL_WORDS = re.compile(r"\s--|^\s*(?:\w+=\S*\s+)*vllm\s|\n")
_RUN = re.compile(r"\$\(|`")
"""A command substitution in a value, which only a shell could run."""
_MOST_NAMED = 12


def read_given(text: str, environ: Mapping[str, str] = os.environ) -> GivenConfig:
    """The only engine in a text; ``environ`` is this process's environment.

    Raises:
        BadQuestion: there is none, or several.
    """
    found = read_engines(text, environ)
    if len(found) > 1:
        raise BadQuestion(CONFIG, f"one engine, as {shown(text)}#{found[0].name}", _names(found))
    return found[0]


def read_engines(text: str, environ: Mapping[str, str] = os.environ) -> tuple[GivenConfig, ...]:
    """Every engine in a text, at least one.

    Raises:
        BadQuestion: there is none, a file cannot be read, or vLLM would not start with it.
    """
    content, folder, name = _content(text)
    found = tuple(_engines(content, folder, environ, shown(text)))
    if not found:
        raise BadQuestion(CONFIG, _FORMS, f"no start of vLLM in {shown(text)}")
    if all(one.transfer is None for one in found) and _SPEAKS_OF_ONE.search(content):
        expected = "the connector as --kv-transfer-config, or as the key kv-transfer-config"
        raise BadQuestion(CONFIG, expected, f"one in another place of {shown(text)}")
    if not name:
        return found
    named = tuple(one for one in found if one.name == name)
    if not named:
        raise BadQuestion(CONFIG, f"an engine called {name} in it", _names(found))
    return named


def _content(text: str) -> tuple[str, str, str]:
    """The text to parse, the folder of its file, and the name of the selected engine."""
    if text.lstrip().startswith("{") or _SHELL_WORDS.search(text):
        return text, ".", ""
    path, _, name = text.partition("#")
    if Path(text).exists():
        path, name = text, ""
    try:
        return Path(path).read_text(encoding="utf-8"), str(Path(path).parent), name
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadQuestion(CONFIG, _FORMS, f"{shown(path)}: {why}") from None


def _engines(
    content: str, folder: str, environ: Mapping[str, str], where: str
) -> Iterator[GivenConfig]:
    read = _reader(folder)
    stripped = content.strip()
    # 1. JSON: the value of --kv-transfer-config, or a document.
    if stripped.startswith("{"):
        yield from _of_nodes([_json(stripped, where)], environ, folder, read)
        return
    # 2. A systemd unit.
    if _UNIT.search(content):
        launches = launches_of_unit(content, read)
    # 3. YAML, such as Compose or Kubernetes; else a script, or a line of one.
    else:
        nodes = _documents(content)
        if nodes is not None:
            yield from _of_nodes(nodes, environ, folder, read)
            return
        launches = launches_of_script(content, environ, read)
    for launch in launches:
        yield _of_launch(launch, environ, read)


def _of_nodes(
    nodes: list[Any], environ: Mapping[str, str], folder: str, read: ReadText
) -> Iterator[GivenConfig]:
    found: list[Launch | GivenMapping] = []
    for node in nodes:
        if isinstance(node, Mapping) and is_bare_transfer(node):
            yield GivenConfig(node, as_nixl=_as_nixl(environ))
            continue
        inner = list(engines_in(node, environ, read))
        if not inner and len(nodes) == 1 and isinstance(node, Mapping):
            inner = [GivenMapping(node)]  # a --config file without a connector
        found += inner
    for one in found:
        if isinstance(one, Launch):
            yield _of_launch(one, environ, read)
        else:
            yield _of_mapping(one, environ)


def _of_mapping(given: GivenMapping, environ: Mapping[str, str]) -> GivenConfig:
    options = dict(given.options)
    transfer = options.get(TRANSFER, options.get(TRANSFER.replace("_", "-")))
    if transfer is not None and not isinstance(transfer, Mapping | str):
        raise BadQuestion(f"{CONFIG}: {TRANSFER}", "an object", type(transfer).__name__)
    ignored: list[str] = []
    words = words_of_file(options, ignored)
    found = read_arguments(words, lambda path: {})
    return GivenConfig(
        found.transfer, found.options, as_nixl=_as_nixl(environ), name=given.name,
        ignored=(*ignored, *found.ignored),
    )  # fmt: skip


def _of_launch(launch: Launch, environ: Mapping[str, str], read: ReadText) -> GivenConfig:
    def read_file(path: str) -> Any:
        text = launch.files.get(path) or read(path)
        if text is None:
            raise BadQuestion(f"{CONFIG} {path}", "a file to read", "none there")
        return _yaml(text, path)[0]

    found = read_arguments(launch.words, read_file)
    outer = environ if launch.inherits else {}
    guessed = tuple(name for name, value in launch.environ.items() if _RUN.search(value))
    known = {name: value for name, value in launch.environ.items() if name not in guessed}
    known |= {name: AN_ADDRESS for name in ADDRESSES if name in guessed}
    return GivenConfig(
        found.transfer, found.options, known, _as_nixl({**outer, **known}), launch.name,
        launch.in_container, launch.is_host_network, launch.inherits, guessed, found.ignored,
    )  # fmt: skip


def _as_nixl(environ: Mapping[str, str]) -> bool:
    return environ.get("PDCONN_AS_NIXL") == "1"


def _reader(folder: str) -> ReadText:
    """Reads files as a command names them: relative to here, else to the command's own file."""

    def read(path: str) -> str | None:
        for place in (Path(path), Path(folder) / path):
            try:
                return place.read_text(encoding="utf-8")
            except (OSError, ValueError):
                continue
        return None

    return read


def _documents(content: str) -> list[Any] | None:
    """The mappings or lists of a YAML file; None for other text, such as a script."""
    if content.startswith("#!"):
        return None
    try:
        nodes = [node for node in _yaml(content, "it") if node is not None]
    except BadQuestion:
        return None
    for node in nodes:
        # A command may look like a mapping: `vllm serve M --x '{"a": 1}'` has a colon.
        if isinstance(node, Mapping):
            if not all(_KEY.fullmatch(str(key)) for key in node):
                return None
        elif not isinstance(node, list):
            return None
    return nodes or None


def _yaml(content: str, where: str) -> list[Any]:
    try:
        yaml = import_module("yaml")  # a dependency of vLLM; without it files must be JSON
    except ImportError:
        raise BadQuestion(CONFIG, "JSON, or PyYAML for a file of YAML", where) from None
    try:
        return list(yaml.safe_load_all(content)) or [None]
    except (yaml.YAMLError, RecursionError) as error:
        raise BadQuestion(CONFIG, "JSON or YAML", f"{where}: {error}") from None


def _json(content: str, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        try:
            return _yaml(content, where)[0]  # {a: b} is YAML too
        except BadQuestion:
            raise BadQuestion(CONFIG, "JSON", f"{where}: {error}") from None


def _names(found: tuple[GivenConfig, ...]) -> str:
    names = [one.name or "one without a name" for one in found]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{len(names)}: {', '.join(names[:_MOST_NAMED])}{more}"


def shown(where: str) -> str:
    """A text or path for an error, on one short line."""
    line = " ".join(where.split())
    return line if len(line) < 80 else f"{line[:77]}..."
