"""Findings about an engine's configuration: does not start, hand over or fall back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pdconn.router.fleet.engine_client import KEEPALIVE_S
from pdconn.sidechannel.advertise import VARIABLES, NoAdvertisedHost, advertised_host
from pdconn.sidechannel.credentials import ENV_SECRET_FILE
from pdconn.tools.doctor.findings import Finding, fault, of_error, warning
from pdconn.tools.doctor.given.arguments import HYBRID_OFF, TRANSFER
from pdconn.tools.doctor.given.given_config import (
    AN_ADDRESS,
    DEFAULT_HOST,
    DEFAULT_PORT,
    GivenConfig,
)
from pdconn.vllm.config import ConfigError, Settings, try_settings
from pdconn.vllm.nixl.connector_registry import MODULES, NAMES
from transport.errors import FieldError, did_you_mean

_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_TRANSFER_KEYS = (
    "kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port", "kv_load_failure_policy",
    "kv_connector_extra_config", "kv_connector_module_path", "enable_permute_local_kv",
)  # fmt: skip
"""All fields of vLLM's KVTransferConfig."""
_KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
_CREDENTIALS = ("secret_file", "tls_cert", "tls_key", "tls_ca")
_SET = 'set "kv_connector": "PdconnConnector", "kv_connector_module_path": "pdconn.vllm"'


def settings_of_given(
    given: GivenConfig, environ: Mapping[str, str]
) -> tuple[Settings | None, list[FieldError]]:
    """Our settings as the engine would parse them, or all errors at which it would not start.

    Args:
        environ: of the starting shell.
    """
    merged = dict(given.engine_environment(environ))
    extra = dict(given.extra)
    if given.in_container:
        _leave_to_container(extra, merged)
    host = merged.get("VLLM_NIXL_SIDE_CHANNEL_HOST", DEFAULT_HOST)
    port = merged.get("VLLM_NIXL_SIDE_CHANNEL_PORT", str(DEFAULT_PORT))
    errors: list[FieldError] = []
    if not port.isdecimal():
        errors.append(ConfigError("VLLM_NIXL_SIDE_CHANNEL_PORT", "a port number", port))
        port = str(DEFAULT_PORT)
    role = str((given.transfer or {}).get("kv_role"))
    settings, refused = try_settings(extra, host, int(port), 0, merged, role=role)
    errors += refused
    if settings is not None and given.lends:
        try:
            named_host(settings, merged)
        except NoAdvertisedHost as error:
            errors.append(error)
    return (None if errors else settings), errors


def _leave_to_container(extra: dict[str, object], environ: dict[str, str]) -> None:
    """Remove what only the container knows: files that are not here, and its address."""
    unseen = [key for key in _CREDENTIALS if key in extra and not _is_here(extra[key])]
    for key in unseen:
        del extra[key]
    if ENV_SECRET_FILE in environ and not _is_here(environ[ENV_SECRET_FILE]):
        unseen.append(environ.pop(ENV_SECRET_FILE))
    if unseen:
        extra["insecure"] = True
    if not any(environ.get(name) for name in VARIABLES):
        environ[VARIABLES[0]] = AN_ADDRESS


def _is_here(path: object) -> bool:
    return not isinstance(path, str) or Path(path).exists()


def names_unseen_files(given: GivenConfig) -> bool:
    """Whether its credentials are files of a container, which are not here."""
    named = [given.extra.get(key) for key in _CREDENTIALS] + [given.environ.get(ENV_SECRET_FILE)]
    return given.in_container and not all(_is_here(path) for path in named if path is not None)


def named_host(settings: Settings, environ: Mapping[str, str]) -> str:
    """The host in the tickets of an engine that lends.

    Raises:
        NoAdvertisedHost: the engine would not start.
    """
    return advertised_host(settings.side_channel_host, settings.advertise_host, environ)


def judge_given(given: GivenConfig, refused: list[FieldError]) -> Iterator[Finding]:
    """The findings about a configuration.

    Args:
        refused: errors from :func:`settings_of_given`.
    """
    for words in given.ignored:
        remedy = "write it so that vLLM reads it; docs/doctor.md lists what it does not"
        yield warning("config.ignored", "vLLM's command line", f"without effect: {words}", remedy)
    yield from _hybrid(given)
    yield from _keep_alive(given)
    if given.transfer is None:
        remedy = (
            """add --kv-transfer-config '{"kv_connector": "PdconnConnector", """
            """"kv_connector_module_path": "pdconn.vllm", "kv_role": "kv_both", """
            """"kv_load_failure_policy": "recompute"}'"""
        )
        text = "expected a KV connector, got none: the engine computes every prompt itself"
        yield fault("config.no-connector", TRANSFER, text, remedy)
        return
    yield from _transfer_keys(given.transfer)
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
    for error in refused:
        remedy = "correct the key; docs/configuration.md lists what each takes"
        yield of_error(f"config.{_slug(error.field)}", error, remedy)


def _keep_alive(given: GivenConfig) -> Iterator[Finding]:
    """A finding if vLLM's server closes idle connections before the router does."""
    set_to = given.environ.get(_KEEP_ALIVE)
    if set_to is None or (set_to.isdecimal() and int(set_to) > KEEPALIVE_S):
        return
    message = f"expected more than {KEEPALIVE_S:g} s, got {set_to}"
    remedy = (
        "leave it at vLLM's 5: the router closes idle connections after "
        f"{KEEPALIVE_S:g} s, and has to send a request twice that meets one which the engine closes"
    )
    yield warning("config.keep-alive", _KEEP_ALIVE, message, remedy)


def _transfer_keys(transfer: Mapping[str, object]) -> Iterator[Finding]:
    for key in transfer:
        if key not in _TRANSFER_KEYS:
            hint = did_you_mean(str(key), _TRANSFER_KEYS)
            message = f"expected a key of vLLM's KVTransferConfig, got {key!r}; {hint}"
            remedy = "correct it, or move keys of pdconn into kv_connector_extra_config"
            yield fault("config.transfer-key", TRANSFER, message, remedy)


def _connector(given: GivenConfig) -> Iterator[Finding]:
    if given.ours is None:
        seen = (given.transfer or {}).get("kv_connector")
        message = f"expected pdconn's connector among its connectors, got none of them in {seen}"
        yield fault("config.connector", "kv_connector", message, _SET)
        return
    if given.names_ours(given.ours):
        return
    name, path = given.ours.get("kv_connector"), given.ours.get("kv_connector_module_path")
    if path is not None and str(path) not in MODULES and _is_meant(name, path):
        hint = did_you_mean(str(path), MODULES, what="modules")
        message = f"expected a module of pdconn, got {path!r}; {hint}"
        yield fault("config.module-path", "kv_connector_module_path", message, _SET)
        return
    of = "" if path is None else f" of {path!r}"
    message = f"expected pdconn's connector, got {name!r}{of}"
    if path is not None and str(path) in MODULES:
        message += f"; that module has {', '.join(MODULES[str(path)])}"
    yield fault("config.connector", "kv_connector", message, _SET)


def _is_meant(name: object, path: object) -> bool:
    """Whether an unknown module path was probably meant to be ours."""
    return name in NAMES or did_you_mean(str(path), MODULES).startswith("did you mean")


def _hybrid(given: GivenConfig) -> Iterator[Finding]:
    if given.options.get(HYBRID_OFF):
        yield fault(
            "config.hybrid-off",
            "--disable-hybrid-kv-cache-manager",
            "the hybrid KV cache manager is off: layers with windows keep the KV of all tokens and "
            "hand it over",
            "take --disable-hybrid-kv-cache-manager out: pdconn supports the hybrid manager",
        )


def _fallback(transfer: Mapping[str, object], role: object) -> Iterator[Finding]:
    policy = transfer.get("kv_load_failure_policy", "fail")
    if role in ("kv_consumer", "kv_both") and policy != "recompute":
        message = f"got {policy!r}, vLLM's default: a request whose pull fails ends with an error"
        remedy = 'set "kv_load_failure_policy": "recompute": decode then computes the prompt'
        yield warning("config.fail-policy", "kv_load_failure_policy", message, remedy)


def _slug(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")
