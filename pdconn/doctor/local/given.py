"""The configuration of an engine, as a user has it, checked without vLLM.

Three forms are understood::

    '{"kv_connector": "PdconnConnector", ...}'             the JSON of --kv-transfer-config
    engine.yaml, engine.json                           that, or vLLM's --config file around it
    "vllm serve MODEL --kv-transfer-config '{...}'"    a command line
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pdconn.doctor.errors import BadQuestion
from pdconn.doctor.findings import Finding, fault, of_error, warning
from pdconn.sidechannel.advertise import NoAdvertisedHost, advertised_host
from pdconn.vllm.config import ConfigError, Settings, read_settings
from pdconn.vllm.nixl.registry import NAMES, REPLACED
from transport.errors import FieldError

_OPTION = "--config"
_DOTTED = "kv_transfer_config."
_TRANSFER = "kv_transfer_config"
_EXTRA = "kv_connector_extra_config"
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_PACKAGE = "pdconn.vllm"
_MULTI = "MultiConnector"
_MOST_RANKS = 64
DEFAULT_PORT = 5600
DEFAULT_HOST = "localhost"


@dataclass(frozen=True, slots=True)
class GivenConfig:
    """An engine's options that matter here.

    Attributes:
        transfer: the value of ``--kv-transfer-config``; None where there is none.
        options: all other options, by name with underscores.
        environ: environment variables that the command line sets.
        as_nixl: NixlConnector's name stands for ours (``PDCONN_AS_NIXL=1``).
    """

    transfer: Mapping[str, Any] | None
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    as_nixl: bool = False

    @property
    def ours(self) -> Mapping[str, Any] | None:
        """The entry of our connector: the whole, or one of MultiConnector's."""
        if self.transfer is None or self.transfer.get("kv_connector") != _MULTI:
            return self.transfer
        extra = self.transfer.get(_EXTRA)
        children = extra.get("connectors") if isinstance(extra, Mapping) else None
        for child in children if isinstance(children, list) else []:
            if isinstance(child, Mapping) and self.names_ours(child):
                return child
        return None

    def names_ours(self, entry: Mapping[str, Any]) -> bool:
        """Whether vLLM makes our connector of an entry."""
        path = str(entry.get("kv_connector_module_path", ""))
        names = (*NAMES, *(REPLACED if self.as_nixl else ()))
        return path.startswith(_PACKAGE) or (entry.get("kv_connector") in names and not path)

    @property
    def lends(self) -> bool:
        """Whether its role has a side channel."""
        return (self.transfer or {}).get("kv_role") in ("kv_producer", "kv_both")

    @property
    def num_ports(self) -> int:
        """Ports of side channels on this host: one for each data-parallel rank here."""
        for name in ("data_parallel_size_local", "data_parallel_size"):
            size = str(self.options.get(name, ""))
            if size.isdecimal() and 0 < int(size) <= _MOST_RANKS:
                return int(size)
        return 1

    @property
    def extra(self) -> Mapping[str, Any]:
        """Our ``kv_connector_extra_config``."""
        extra = (self.ours or {}).get(_EXTRA, {})
        return extra if isinstance(extra, Mapping) else {}


def read_given(text: str, environ: Mapping[str, str] = os.environ) -> GivenConfig:
    """Understand one of the three forms; ``environ`` is this process's environment.

    Raises:
        BadQuestion: it is none of them, or the file cannot be read.
    """
    given = _read(text)
    as_nixl = {**environ, **given.environ}.get("PDCONN_AS_NIXL") == "1"
    return replace(given, as_nixl=as_nixl)


def _read(text: str) -> GivenConfig:
    stripped = text.strip()
    if stripped.startswith("{"):
        return _of_mapping(_parsed(stripped, stripped))
    if "--kv-transfer-config" in text or stripped.startswith("vllm "):
        return _of_command(stripped)
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        expected = "JSON, a file, or a line 'vllm serve ...'"
        why = getattr(error, "strerror", None) or str(error)
        raise BadQuestion(_OPTION, expected, f"{text}: {why}") from None
    return _of_mapping(_parsed(content, text))


def _of_mapping(found: Any) -> GivenConfig:
    if not isinstance(found, Mapping):
        raise BadQuestion(_OPTION, "an object", type(found).__name__)
    if "kv_connector" in found or _EXTRA in found:
        return GivenConfig(found)
    options = {str(key).replace("-", "_"): value for key, value in found.items()}
    transfer = options.pop(_TRANSFER, None)
    if isinstance(transfer, str):
        transfer = _parsed(transfer, _TRANSFER)
    if transfer is not None and not isinstance(transfer, Mapping):
        raise BadQuestion(f"{_OPTION}: {_TRANSFER}", "an object", type(transfer).__name__)
    return GivenConfig(transfer, options)


def _of_command(line: str) -> GivenConfig:
    try:
        # A shell joins the lines of a command that goes on; shlex keeps the newline as a word.
        words = shlex.split(re.sub(r"\\\r?\n", "", line), comments=False)
    except ValueError as error:
        raise BadQuestion(_OPTION, "a command line in balanced quotes", str(error)) from None
    environ: dict[str, str] = {}
    options: dict[str, Any] = {}
    while words and "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        if not equals and words and not words[0].startswith("--"):
            value, equals = words.pop(0), "="
        options[name.replace("-", "_")] = value if equals else True
    transfer = options.pop(_TRANSFER, None)
    dotted = [name for name in options if name.startswith(_DOTTED)]
    if transfer is None and dotted:
        transfer = _nested({name: options.pop(name) for name in dotted})
    elif transfer is not None:
        transfer = _parsed(str(transfer), "--kv-transfer-config")
        if not isinstance(transfer, Mapping):
            raise BadQuestion("--kv-transfer-config", "an object", type(transfer).__name__)
    return GivenConfig(transfer, options, environ)


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """``--kv-transfer-config.kv_role kv_both`` and the like, as vLLM joins them."""
    made: dict[str, Any] = {}
    for name, value in options.items():
        *above, last = name.removeprefix(_DOTTED).split(".")
        inner = made
        for key in above:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                expected = f"{key} as a value or in parts"
                raise BadQuestion("--kv-transfer-config", expected, f"both: {inner!r} and {name}")
        try:
            inner[last] = json.loads(value) if isinstance(value, str) else value
        except ValueError:
            inner[last] = value
    return made


def _parsed(content: str, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        if content.lstrip().startswith("{"):
            raise BadQuestion(_OPTION, "JSON", f"{_shown(where)}: {error}") from None
    try:
        yaml = import_module("yaml")  # of vLLM; without it files must be JSON
    except ImportError:
        raise BadQuestion(_OPTION, "JSON, or PyYAML for a file of YAML", _shown(where)) from None
    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise BadQuestion(_OPTION, "JSON or YAML", f"{_shown(where)}: {error}") from None


def _shown(where: str) -> str:
    return where if len(where) < 80 else f"{where[:77]}..."


def settings_of_given(
    given: GivenConfig, environ: Mapping[str, str]
) -> tuple[Settings | None, FieldError | None]:
    """Our settings as the engine would read them, or why it would refuse to start."""
    merged = {**environ, **given.environ}
    host = merged.get("VLLM_NIXL_SIDE_CHANNEL_HOST", DEFAULT_HOST)
    port = merged.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(DEFAULT_PORT))
    if not port.isdecimal():
        return None, ConfigError("VLLM_NIXL_SIDE_CHANNEL_PORT", "a port number", port)
    role = str((given.transfer or {}).get("kv_role"))
    try:
        settings = read_settings(given.extra, host, int(port), 0, merged, role=role)
        if given.lends:
            named_host(settings, merged)
    except (ConfigError, NoAdvertisedHost) as error:
        return None, error
    return settings, None


def named_host(settings: Settings, environ: Mapping[str, str]) -> str:
    """The host in the tickets of an engine that lends.

    Raises:
        NoAdvertisedHost: the engine would not start.
    """
    return advertised_host(settings.side_channel_host, settings.advertise_host, environ)


def judge_given(given: GivenConfig, refused: FieldError | None) -> Iterator[Finding]:
    """What keeps the engine from starting, from handing over, or from falling back.

    Args:
        refused: by :func:`settings_of_given`.
    """
    yield from _hybrid(given)
    if given.transfer is None:
        remedy = (
            """add --kv-transfer-config '{"kv_connector": "PdconnConnector", """
            """"kv_connector_module_path": "pdconn.vllm", "kv_role": "kv_both", """
            """"kv_load_failure_policy": "recompute"}'"""
        )
        text = "expected a KV connector, got none: the engine computes every prompt itself"
        yield fault("config.no-connector", _TRANSFER, text, remedy)
        return
    yield from _connector(given)
    role = given.transfer.get("kv_role")
    if role not in _ROLES:
        message = f"expected one of {', '.join(_ROLES)}, got {role!r}"
        remedy = (
            'set "kv_role": "kv_producer" for prefill, "kv_consumer" for decode, or "kv_both" for '
            "either"
        )
        yield fault("config.role", "kv_role", message, remedy)
    yield from _fallback(given.transfer, role)
    if refused is not None:
        remedy = "correct the key; docs/configuration.md lists what each takes"
        yield of_error(f"config.{_slug(refused.field)}", refused, remedy)


def _connector(given: GivenConfig) -> Iterator[Finding]:
    if given.ours is not None and given.names_ours(given.ours):
        return
    remedy = 'set "kv_connector": "PdconnConnector", "kv_connector_module_path": "pdconn.vllm"'
    seen = (given.transfer or {}).get("kv_connector")
    message = f"expected pdconn's connector, got {seen!r}"
    yield fault("config.connector", "kv_connector", message, remedy)


def _hybrid(given: GivenConfig) -> Iterator[Finding]:
    off = given.options.get("disable_hybrid_kv_cache_manager")
    if _is_on(off):
        yield fault(
            "config.hybrid-off",
            "--disable-hybrid-kv-cache-manager",
            "the hybrid KV cache manager is off: layers with windows keep the KV of all tokens and "
            "hand it over",
            "take --disable-hybrid-kv-cache-manager out: pdconn supports the hybrid manager",
        )


def _fallback(transfer: Mapping[str, Any], role: object) -> Iterator[Finding]:
    policy = transfer.get("kv_load_failure_policy", "fail")
    if role in ("kv_consumer", "kv_both") and policy != "recompute":
        message = f"got {policy!r}, vLLM's default: a request whose pull fails ends with an error"
        remedy = 'set "kv_load_failure_policy": "recompute": decode then computes the prompt'
        yield warning("config.fail-policy", "kv_load_failure_policy", message, remedy)


def _is_on(value: object) -> bool:
    return value is True or str(value).lower() in ("true", "1")


def _slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")
