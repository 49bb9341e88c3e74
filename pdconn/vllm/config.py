"""``kv_connector_extra_config``, read once and strictly.

``KEYS`` at the end is the table of all keys: values, default, meaning, and the corresponding key of
vLLM's in-tree NixlConnector.  The checks and the table in ``docs/configuration.md`` are made from
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdconn.faults.debug_faults import Faults, read_faults
from pdconn.lifecycle.promises import KeepShares
from pdconn.puller.verification import Verify
from pdconn.puller.warmup import Place, parse_places
from pdconn.sidechannel.kv_card import AUTO, WantedCard, parse_kv_interface
from pdconn.sidechannel.security import Security, SecurityError
from pdconn.store.settings import StoreSettings, read_store_settings
from pdconn.store.store_errors import StoreError, StoreSettingError
from pdconn.store.store_keys import load_keys
from pdconn.vllm.nixl.in_tree_keys import IN_TREE_KEYS, InTreeKeyError, Translated, translate
from pdconn.vllm.values import (
    OUR_LAYOUT,
    LendBack,
    cores,
    flag,
    keep,
    layout,
    lease,
    lend_back,
    name,
    names,
    options,
    port,
    seconds,
    text,
    transport,
    verify,
)
from transport.choose import Wanted
from transport.errors import FieldError, did_you_mean
from transport.fault_schedule import FaultError


class ConfigError(FieldError, ValueError):
    """A setting that is unknown, invalid, or not supported."""


Check = Callable[[Any], Any]
"""Returns a checked value, or raises ValueError (:mod:`pdconn.vllm.values`)."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings, by the names of ``KEYS``."""

    side_channel_host: str
    side_channel_port: int
    advertise_host: str | None = None
    kv_lease_duration: float = 30.0
    claim_timeout: float = 10.0
    transport: Wanted = "nixl"
    kv_interface: WantedCard = AUTO
    backends: tuple[str, ...] = ("UCX",)
    backend_options: dict[str, dict[str, str]] = field(default_factory=dict)
    huge_pages: bool = True
    progress_cores: int | None = None
    layout: str = OUR_LAYOUT
    enforce_handshake_compat: bool = True
    weights_id: str | None = None
    description_file: str | None = None
    read_timeout: float = 120.0
    drain_timeout: float = 5.0
    verify: Verify = Verify.OFF
    warm_peers: tuple[Place, ...] = ()
    rehearse: bool = True
    untested_vllm: bool = False
    debug_faults: Faults = field(default_factory=Faults)
    security: Security = field(default_factory=Security)
    store: StoreSettings | None = None
    lend_back: LendBack | None = None
    keep: KeepShares | None = field(default_factory=KeepShares)


def read_settings(
    extra: Mapping[str, Any],
    host: str,
    port: int,
    port_offset: int,
    environ: Mapping[str, str] = os.environ,
    *,
    role: str = "kv_both",
) -> Settings:
    """Check ``kv_connector_extra_config``.

    Args:
        extra: the user's mapping.
        host, port: defaults for the side channel, from vLLM's environment.
        port_offset: the data-parallel index, added to the port.
        environ: may contain the secret, or the path of its file.
        role: vLLM's ``kv_role``, on which the meaning of NixlConnector's keys depends.

    Raises:
        ConfigError: naming the key, the expected and the seen value.
    """
    settings, errors = try_settings(extra, host, port, port_offset, environ, role=role)
    if settings is None:
        first, *more = errors
        hints = [first.hint] if first.hint else []
        hint = "; ".join([*hints, *(f"and {error}" for error in more)])
        raise ConfigError(first.field, first.expected, first.seen, hint) from first.__cause__
    return settings


def try_settings(
    extra: Mapping[str, Any],
    host: str,
    port: int,
    port_offset: int,
    environ: Mapping[str, str] = os.environ,
    *,
    role: str = "kv_both",
) -> tuple[Settings | None, list[ConfigError]]:
    """The settings, or all their errors; for the arguments of :func:`read_settings`."""
    errors = _unknown_keys(extra)
    try:
        extra = in_our_keys(extra, role).extra
    except ConfigError as error:
        errors.append(error)
    values: dict[str, Any] = {"side_channel_host": host, "side_channel_port": port}
    values |= _checked(extra, _CHECKS, errors)
    values["side_channel_port"] += port_offset
    for part, read in (
        ("debug_faults", lambda: _faults(extra)),
        ("security", lambda: _security(extra, environ, errors)),
        ("store", lambda: _store(extra)),
    ):
        try:
            values[part] = read()
        except ConfigError as error:
            errors.append(error)
    return (None if errors else Settings(**values)), errors


def read_layout(extra: Mapping[str, Any]) -> str:
    """The key ``layout`` alone, which vLLM needs before the other settings can be read.

    Raises:
        ConfigError: it is no layout, and not ``auto`` or ``none``.
    """
    ours = in_our_keys(extra).extra
    errors: list[ConfigError] = []
    asked: str = _checked(ours, {"layout": layout}, errors).get("layout", OUR_LAYOUT)
    if errors:
        raise errors[0]
    return asked


def _unknown_keys(extra: Mapping[str, Any]) -> list[ConfigError]:
    known = [key.name for key in KEYS] + [key.name for key in IN_TREE_KEYS]
    errors = []
    for key in extra:
        if key not in known:
            hint = did_you_mean(key, known)
            if key == "secret":
                hint = "configs are logged, so put it in a file (secret_file) or in PDCONN_SECRET"
            errors.append(ConfigError("kv_connector_extra_config", "a known key", repr(key), hint))
    return errors


def in_our_keys(extra: Mapping[str, Any], role: str = "kv_both") -> Translated:
    """``extra`` with NixlConnector's keys translated (:mod:`pdconn.vllm.nixl.in_tree_keys`).

    Raises:
        ConfigError: naming the key, the expected and the seen value.
    """
    try:
        return translate(extra, role)
    except InTreeKeyError as error:
        raise ConfigError(error.field, error.expected, error.seen, error.hint) from error


def _checked(
    extra: Mapping[str, Any], checks: Mapping[str, Check], errors: list[ConfigError]
) -> dict[str, Any]:
    """The checked values of ``extra``; invalid ones are added to ``errors``."""
    values = {}
    for key, check in checks.items():
        if key not in extra:
            continue
        try:
            values[key] = check(extra[key])
        except ValueError as error:
            errors.append(ConfigError(key, error, repr(extra[key])))
    return values


def _security(
    extra: Mapping[str, Any], environ: Mapping[str, str], errors: list[ConfigError]
) -> Security:
    try:
        return Security.load(**_checked(extra, _SECURITY_CHECKS, errors), environ=environ)
    except SecurityError as error:
        raise ConfigError(error.field, error.expected, error.seen, error.hint) from error


def _faults(extra: Mapping[str, Any]) -> Faults:
    try:
        return read_faults(extra.get("debug_faults", {}))
    except FaultError as error:
        raise ConfigError(error.field, error.expected, repr(error.seen), error.hint) from None


def _store(extra: Mapping[str, Any]) -> StoreSettings | None:
    if extra.get("store") is None:
        return None
    try:
        settings = read_store_settings(extra["store"])
        load_keys(settings.key_file)  # a mistake is found before the model is loaded
    except StoreSettingError as error:
        raise ConfigError(error.field, error.expected, error.seen, error.hint) from error
    except StoreError as error:
        raise ConfigError("store.key_file", "what can be used here", str(error)) from error
    return settings


@dataclass(frozen=True, slots=True)
class Key:
    """One key of ``kv_connector_extra_config``.

    ``side``: which engine reads it; ``in_tree``: its counterpart in NixlConnector's
    ``kv_connector_extra_config``; ``check``: None if another function checks the value.
    """

    name: str
    takes: str
    default: str
    check: Check | None
    side: str
    help: str
    in_tree: str = ""


_SAME = "the same key"

KEYS: tuple[Key, ...] = (
    Key(
        "side_channel_host", "text", "`VLLM_NIXL_SIDE_CHANNEL_HOST`, then `localhost`", text,
        "prefill", "Address that prefill listens at; `0.0.0.0` and `::` are every one.",
        "`VLLM_NIXL_SIDE_CHANNEL_HOST`",
    ),
    Key(
        "advertise_host", "text", "`side_channel_host`; where that is `0.0.0.0` or `::`, `POD_IP` "
        "or `VLLM_HOST_IP` of the environment, then the address of the machine's name, unless that "
        "is loopback", text, "prefill",
        "Host that tickets name. Decode must be able to dial it, certificates must name it, and "
        "`warm_peers` of decode too.", "`VLLM_NIXL_SIDE_CHANNEL_HOST`",
    ),
    Key(
        "side_channel_port", "port", "`VLLM_NIXL_SIDE_CHANNEL_PORT`, then 5600", port, "prefill",
        "Port of the side channel. The data-parallel index is added to it.",
        "`VLLM_NIXL_SIDE_CHANNEL_PORT`",
    ),
    Key(
        "kv_lease_duration", "seconds", "30", lease, "prefill",
        "The lease: how long prefill keeps lent blocks without a claim or renewal from decode.",
        _SAME,
    ),
    Key(
        "claim_timeout", "seconds", "10", seconds, "decode",
        "How long decode waits for each answer of prefill: greeting, claim, checksums.",
    ),
    Key(
        "transport", "`nixl`, `ucx`, `auto`", "`nixl`", transport, "both",
        "What moves the bytes. `ucx` is UCX without NIXL, for host memory only; `auto` is `nixl` "
        "where it loads, else `ucx`. Both sides need the same.",
    ),
    Key(
        "kv_interface", "`auto`, a card, or an address with prefix length", "`auto`",
        parse_kv_interface, "both",
        "The network card that carries KV: `eth1`, `mlx5_0:1`, or `172.30.1.0/24` for the card "
        "with an address in that network. `auto` is the card that carries the side channel's "
        "address, unless that would exclude RDMA, see `docs/network.md`. `UCX_NET_DEVICES` goes "
        "first.",
    ),
    Key(
        "backends", "list of text", '`["UCX"]`', names, "both", "NIXL backends.", _SAME,
    ),
    Key(
        "backend_options", "options per backend", "none", options, "both",
        "Parameters of each NIXL backend, as NIXL takes them, for example "
        '`{"UCX": {"engine_config": "TLS=tcp"}}`.',
    ),
    Key(
        "huge_pages", "true, false", "true", flag, "both",
        "Ask the kernel for huge pages under KV memory on the host.",
    ),
    Key(
        "progress_cores", "`auto`, 0, 1", "`auto`", cores, "decode",
        "Cores that NIXL's progress thread may keep busy while reads over TCP last (10 ms); over "
        "shared memory and RDMA it rests. `auto` is 1 where the model leaves a core to it, else "
        "0. It is never a core that the model is bound to.",
    ),
    Key(
        "layout", "`auto`, `none` or a layout", "`auto`", layout, "both",
        "Memory order of KV blocks to ask vLLM for: `auto` is `LBHNC` (head-major), and none for "
        "MLA and on ROCm; `none` leaves it to the attention backend. `VLLM_KV_CACHE_LAYOUT` goes "
        "first, and vLLM drops what the backend does not read.", "always `LBHNC`, but for MLA",
    ),
    Key(
        "enforce_handshake_compat", "true, false", "true", flag, "both",
        "Refuse peers of another model, other weights, another KV dtype or block content; see "
        "`docs/compatibility.md`.", _SAME,
    ),
    Key(
        "weights_id", "letters, digits, `.`, `_`, `-`", "none", name, "both",
        "A name for these very weights, where nothing proves which they are: an object store, "
        "ModelScope, a loader of your own, see `docs/compatibility.md`. It is believed, so change "
        "it whenever they change.",
    ),
    Key(
        "description_file", "path", "none", text, "both",
        "Where to write what this engine's KV looks like, for `pdconn diff`.",
    ),
    Key(
        "secret_file", "path", "`PDCONN_SECRET_FILE`, then `PDCONN_SECRET`", text, "both",
        "File with the shared secret: 16 bytes or more, not world-readable, writable by "
        "its owner only. A secret or TLS is required unless the side channel is on loopback. "
        "No key takes the secret itself, since configurations are logged.",
    ),
    Key(
        "tls_cert", "path", "none", text, "both",
        "PEM file with our certificate, good for server and client. With `tls_key` and `tls_ca` "
        "it turns on TLS 1.3.",
    ),
    Key(
        "tls_key", "path", "none", text, "both",
        "Key of `tls_cert`, without passphrase, not world-readable, writable by its owner only.",
    ),
    Key(
        "tls_ca", "path", "none", text, "both",
        "PEM file with the CA that signs the peers' certificates.",
    ),
    Key(
        "tls_check_hostname", "true, false", "true", flag, "decode",
        "The certificate of prefill must name the host that tickets name (`advertise_host`).",
    ),
    Key(
        "insecure", "true, false", "false", flag, "both",
        "Serve and dial addresses other than loopback without secret and TLS.",
    ),
    Key(
        "read_timeout", "seconds", "120", seconds, "decode",
        "How long decode waits for its transport to connect, for the reads of a pull, and for its "
        "own checksums.",
    ),
    Key(
        "drain_timeout", "seconds", "5", seconds, "decode",
        "How long a failed pull waits for reads still in flight. After that it is reported failed "
        "and its blocks are quarantined until the reads end.",
    ),
    Key(
        "verify", "`off`, `sample`, `always`", "`off`", verify, "both",
        "Compare checksums of what was lent with what arrived; `sample` is a sixteenth of the "
        "blocks. Set it on both sides.",
    ),
    Key(
        "warm_peers", "list of `host:port`", "none", parse_places, "decode",
        "Side channels of prefill engines, as their tickets name them. Decode greets them, "
        "connects and reads a page before the first request, and again when they restart.",
    ),
    Key(
        "rehearse", "true, false", "true", flag, "both",
        "At the start, pull a page from ourselves, so that the first request's pull does nothing "
        "for the first time. Takes about 0.2 s; a failure is a warning.",
    ),
    Key(
        "untested_vllm", "true, false", "false", flag, "both",
        "Start with a version of vLLM that pdconn was not tested with, which is refused otherwise. "
        "What pdconn assumes of vLLM's internals is checked in any case.",
    ),
    Key(
        "store", "store settings", "none", None, "both",
        "Where KV of prompts is kept beyond the engine, see `docs/stores.md`: "
        '`{"root": "/mnt/kv", "capacity": "200GiB"}`.',
    ),
    Key(
        "lend_back", "true, false, seconds and share", "false", lend_back, "decode",
        "Return a ticket for prompt and answer, for prefill to pull in the next turn, see "
        "`docs/other-routers.md`; needs `kv_role: kv_both`. "
        '`{"seconds": 60, "share": 0.2}`: the lease, and the part of the KV blocks that such '
        "leases may pin, the oldest being given up first.", "`bidirectional_kv_xfer`",
    ),
    Key(
        "keep", "true, false, shares and seconds", "true", keep, "both",
        "Keep the KV of sessions whose requests ask for it, see `docs/router.md`: "
        '`{"share": 0.5, "tenant_share": 0.5, "seconds": 3600}`: the parts of the KV blocks that '
        "all promises and those of one tenant may pin, and the longest promise. They give way to "
        "requests that lack blocks, the oldest first.",
    ),
    Key(
        "debug_faults", "faults", "none", None, "decode",
        "Seeded faults on demand, see `docs/operations.md`.",
    ),
)  # fmt: skip

_SECURITY = (
    "secret_file", "tls_cert", "tls_key", "tls_ca", "tls_check_hostname", "insecure",
)  # fmt: skip
_CHECKS = {k.name: k.check for k in KEYS if k.check is not None and k.name not in _SECURITY}
_SECURITY_CHECKS = {k.name: k.check for k in KEYS if k.check is not None and k.name in _SECURITY}
