"""Parses vLLM's command line as its ``FlexibleArgumentParser`` does.

The steps are vLLM's, in its order and with its peculiarities; a test compares the result with the
real parser::

    --config FILE.yaml            its keys become words, before the rest of the line
    --kv_transfer_config, -O3     dashes and underscores before the first dot are alike
    --kv-transfer-config.a.b 1    joined to one JSON, which is put *behind* all other words
    --kv-t, -dp                   abbreviations and short names; the last of several wins
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdconn.tools.doctor.bad_question import BadQuestion

TRANSFER = "kv_transfer_config"
HYBRID_OFF = "disable_hybrid_kv_cache_manager"
CONFIG = "--config"


@dataclass(frozen=True, slots=True)
class Option:
    """An option of vLLM that is examined.

    Attributes:
        name: with underscores.
        least: the shortest abbreviation that vLLM accepts.
        short: names with one dash.
        is_flag: it takes no value, and the prefix ``--no-`` turns it off.
    """

    name: str
    least: str
    short: tuple[str, ...] = ()
    is_flag: bool = False

    @property
    def long(self) -> str:
        """The option's name with dashes."""
        return "--" + self.name.replace("_", "-")


OPTIONS = (
    Option(TRANSFER, "--kv-t"),
    Option(HYBRID_OFF, "--disable-h", is_flag=True),
    Option("data_parallel_size", "--data-parallel-size", ("-dp",)),
    Option("data_parallel_size_local", "--data-parallel-size-", ("-dpl",)),
)
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_BARE_SIZE = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")')

ReadFile = Callable[[str], Any]
"""The mapping in a file of ``--config``."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The relevant part of a command line.

    Attributes:
        transfer: the value of ``--kv-transfer-config``; None if missing.
        options: values of the other :data:`OPTIONS`, by name.
        ignored: arguments without effect in vLLM, one sentence each.
    """

    transfer: Mapping[str, Any] | None
    options: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


def read_arguments(words: Sequence[str], read_file: ReadFile) -> Arguments:
    """Parse the words after ``vllm serve``.

    Raises:
        BadQuestion: vLLM would not start with them.
    """
    ignored: list[str] = []
    pulled = _with_file(list(words), read_file, ignored)
    undotted, dotted = _split_dotted([one for word in pulled for one in _spelled(word)])
    values = _values(undotted)
    for key, inner in dotted.items():
        option = _named(key)
        if option is None:
            continue
        if option.name in values and option.name == TRANSFER:
            ignored.append(f"{option.long} as one value: vLLM takes its dotted keys in its place")
        values[option.name] = inner
    transfer = values.pop(TRANSFER, None)
    return Arguments(_object(transfer), values, tuple(ignored))


def words_of_file(config: Mapping[Any, Any], ignored: list[str]) -> list[str]:
    """The words into which vLLM expands its configuration file."""
    words: list[str] = []
    for key, value in config.items():
        if value is False:
            if "." in str(key):
                ignored.append(f"{key}: false, since vLLM drops what is false behind a dot")
            words += [f"--no-{key}"] if "." not in str(key) else []
        elif value is True:
            words.append(f"--{key}")
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        else:
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _with_file(words: list[str], read_file: ReadFile, ignored: list[str]) -> list[str]:
    """Insert options of the file first, so that those of the command line win."""
    ignored += [
        f"{word}: vLLM reads the file of {CONFIG} only with a space before it"
        for word in words
        if word.startswith(f"{CONFIG}=")
    ]
    if CONFIG not in words:
        return words
    at = words.index(CONFIG)
    if at + 1 == len(words) or words.count(CONFIG) > 1:
        raise BadQuestion(CONFIG, "one file", f"{words.count(CONFIG)} times {CONFIG}")
    path = words[at + 1]
    if path.rpartition(".")[2] not in ("yaml", "yml"):
        raise BadQuestion(CONFIG, "a file whose name ends in .yaml or .yml, as vLLM does", path)
    config = read_file(path)
    if not isinstance(config, Mapping):
        raise BadQuestion(f"{CONFIG} {path}", "an object", type(config).__name__)
    return [*words_of_file(config, ignored), *words[:at], *words[at + 2 :]]


def _spelled(word: str) -> list[str]:
    """The name with dashes up to the first dot; ``-O`` forms are expanded to their option."""
    if word.startswith("--"):
        key, equals, value = word.partition("=")
        name, dot, inner = key.partition(".")
        return [name.replace("_", "-") + dot + inner + equals + value]
    if word.startswith("-O") and word != "-O":
        return ["--optimization-level", word[3:] if word[2] == "=" else word[2:]]
    return [word]


def _split_dotted(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Words without dotted options, and the JSON into which those are merged."""
    left: list[str] = []
    joined: dict[str, dict[str, Any]] = {}
    rest = iter(words)
    for word in rest:
        key, equals, value = word.partition("=")
        if not key.startswith("-") or "." not in key:
            left.append(word)
            continue
        if not equals:
            value = next(rest, "")
        if key.endswith("+"):
            key, value = key[:-1], json.dumps(value.split(","))
        option, *inner = key.split(".")
        made: Any = _value(value)
        for name in reversed(inner):
            made = {name: made}
        _join(joined.setdefault(option, {}), made)
    return left, joined


def _join(into: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        held = into.get(key)
        if isinstance(value, dict) and isinstance(held, dict):
            _join(held, value)
        elif isinstance(value, list) and isinstance(held, list):
            held += value
        else:
            into[key] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        size = _sized(text.strip())
        return text if size is None else size


def _sized(text: str) -> int | None:
    """``1k`` is 1000 and ``1K`` 1024, as in vLLM; None for other text."""
    found = _SIZE.fullmatch(text)
    if found is None or (found[2] in _BINARY and "." in found[1]):
        return None
    times = _DECIMAL.get(found[2]) or _BINARY[found[2]]
    return int(float(found[1]) * times) if found[2] in _DECIMAL else int(found[1]) * times


def _values(words: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word == "--":
            break
        key, equals, value = word.partition("=")
        off = key.startswith("--no-")
        option = _named(f"--{key[5:]}" if off else key)
        if option is None or (off and not option.is_flag):
            continue
        if option.is_flag:
            values[option.name] = not off
            continue
        if not equals:
            value = next(rest, "--")
        if value.startswith("-") and not equals:
            raise BadQuestion(option.long, "a value", "none")
        values[option.name] = value
    return values


def _named(word: str) -> Option | None:
    """The option of a word, in full, abbreviated or short; an exact name has priority."""
    if not word.startswith("-"):
        return None
    for option in OPTIONS:
        if word == option.long or word in option.short:
            return option
    abbreviated = (o for o in OPTIONS if o.long.startswith(word) and word.startswith(o.least))
    return next(abbreviated, None)


def _object(value: Any) -> Mapping[str, Any] | None:
    """``--kv-transfer-config`` as vLLM parses it: JSON, with numbers such as ``80m``."""
    if value is None or value in ("", "None"):
        return None
    if isinstance(value, str):
        parts = _QUOTED.split(value)
        parts[::2] = [_BARE_SIZE.sub(lambda m: str(_sized(m[0])), part) for part in parts[::2]]
        try:
            value = json.loads("".join(parts))
        except (ValueError, RecursionError) as error:
            shown = value if len(value) < 80 else f"{value[:77]}..."
            raise BadQuestion("--kv-transfer-config", "JSON", f"{shown}: {error}") from None
    if not isinstance(value, Mapping):
        raise BadQuestion("--kv-transfer-config", "an object", type(value).__name__)
    return value
