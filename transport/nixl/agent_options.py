"""The parameters of a NIXL agent, and the UCX settings that it uses.

UCX takes a setting from the environment (``UCX_…``), else from the user's ``engine_config``, else
from ours.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_ENGINE_CONFIG = "engine_config"
NET_DEVICES = "UCX_NET_DEVICES"

UCX_DEFAULTS = {
    "TCP_TX_SEG_SIZE": "520K",
    "TCP_RX_SEG_SIZE": "2064K",
    "CUDA_IPC_ENABLE_GET_ZCOPY": "on",
}
"""``TCP_…``: with UCX's own segments of 8 KiB a READ over TCP reaches a fifth of the throughput.
The lender copies into a segment and sends it: half a MiB stays in a core's cache, and a block of
1 MiB and its headers fit two.  The reader receives into a segment as much as there is, and moves
what is left of an incomplete message to the front: the longer its own, the more rarely.

``CUDA_IPC_…``: with UCX's own ``auto``, ``cuda_ipc`` writes, and does not read, on a card without
an active NVLink.  READs between processes of one host then go through TCP, which is some hundred
times slower (vLLM issue 52607, NIXL pull request 2208; ``docs/gpu.md``).  Without a card it has no
effect."""

UCX_TABLES = {"PRINT_TRANSPORT_TABLES": "y"}
"""Makes UCX print the transports of each connection, which NIXL does not report."""

_ONE_ENDPOINT = ("num_workers", "num_threads")
"""With several workers a peer has several endpoints, and the failure of one does not mean that
READs on the others have ended."""


def backend_params(
    backends: Sequence[str],
    options: Mapping[str, Mapping[str, str]] | None,
    show_transports: bool = False,
) -> dict[str, dict[str, str]]:
    """Each backend's parameters: the user's ``options`` over our defaults.

    Args:
        show_transports: make UCX print the transports of each connection.

    Raises:
        ValueError: no backend, options for one that is not used, an
            ``engine_config`` that UCX would ignore in part, more than one worker.
    """
    if not backends:
        raise ValueError("backends: expected at least one NIXL backend, for example UCX, got none")
    options = options or {}
    for backend in options:
        if backend not in backends:
            raise ValueError(f"options for backend {backend!r}, which is not one of {backends}")
    params = {backend: dict(options.get(backend, {})) for backend in backends}
    if "UCX" in params:
        ucx = params["UCX"]
        for option in _ONE_ENDPOINT:
            if int(ucx.get(option, "0")) > 1:
                raise ValueError(f"UCX {option}={ucx[option]}: reads need one endpoint per peer")
        ours = UCX_DEFAULTS | (UCX_TABLES if show_transports else {})
        ucx[_ENGINE_CONFIG] = merged_engine_config(ucx.get(_ENGINE_CONFIG, ""), ours)
    return params


def merged_engine_config(user: str, ours: Mapping[str, str] = UCX_DEFAULTS) -> str:
    """``KEY=value,…`` with our UCX settings first and the user's over them.

    Raises:
        ValueError: a part without ``=``.  NIXL splits at every comma and skips
            such parts, so ``TLS=rc,cuda_copy`` would silently mean ``TLS=rc``;
            lists must be set in the environment.
    """
    settings = {**ours, **_settings(user)}
    return ",".join(f"{key}={value}" for key, value in settings.items())


def settings_of(ucx: Mapping[str, str]) -> dict[str, str]:
    """What the parameters of the UCX backend set that the environment does not.

    Raises:
        ValueError: as :func:`merged_engine_config`.
    """
    found = _settings(ucx.get(_ENGINE_CONFIG, ""))
    return {key: value for key, value in found.items() if f"UCX_{key}" not in os.environ}


def _settings(engine_config: str) -> dict[str, str]:
    settings = {}
    for part in filter(None, (part.strip() for part in engine_config.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                f"engine_config {engine_config!r}: {part!r} is not KEY=value; "
                "set lists in the environment, as UCX_<KEY>"
            )
        settings[key.strip().removeprefix("UCX_")] = value.strip()
    return settings


@contextmanager
def restricted_to(net_devices: Sequence[str]) -> Iterator[None]:
    """UCX contexts created inside use only these network devices; any if there are none.

    Raises:
        ValueError: the environment has such a list, too.
    """
    # By the environment, which UCX reads when it creates a context: ``engine_config`` cannot
    # contain a list, and NIXL's ``device_list`` turns ``eth1`` into ``eth1:1``, the name of an RDMA
    # port.  Neither child processes nor the next transport inherit the variable.
    if not net_devices:
        yield
        return
    if NET_DEVICES in os.environ:
        raise ValueError(
            f"net_devices: expected none beside {NET_DEVICES}={os.environ[NET_DEVICES]} of the "
            f"environment, got {','.join(net_devices)}"
        )
    os.environ[NET_DEVICES] = ",".join(net_devices)
    try:
        yield
    finally:
        del os.environ[NET_DEVICES]


def ucx_environment() -> dict[str, str]:
    """Every ``UCX_…`` variable of this process, which override ``engine_config``."""
    return {key: value for key, value in os.environ.items() if key.startswith("UCX_")}


def ucx_version(maps: str | None = None) -> str:
    """The version of the UCX that nixl has loaded, or ``unknown``."""
    function = getattr(ucx_library(maps), "ucp_get_version_string", None)
    if function is None:
        return "unknown"
    function.restype = ctypes.c_char_p
    return str(function().decode())


def ucx_library(maps: str | None = None) -> ctypes.CDLL | None:
    """The UCX that nixl has loaded; None if it has not.

    Another library may have loaded a UCX of its own, so it is the one whose path contains ``nixl``.
    ``maps`` replaces ``/proc/self/maps``.
    """
    try:
        lines = (
            maps if maps is not None else Path("/proc/self/maps").read_text(encoding="utf-8")
        ).splitlines()
        path = next(line.split()[-1] for line in lines if "libucp" in line and "nixl" in line)
        return ctypes.CDLL(path)
    except (OSError, StopIteration):
        return None
