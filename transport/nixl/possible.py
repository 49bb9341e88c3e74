"""Which transports UCX may use in this process, which NIXL does not report.

A context of our own, of the same library and with the same settings as NIXL's, prints them.  The
transports of each connection are printed by UCX at DEBUG (``transport.nixl.agent_options``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress

from transport.nixl.agent_options import settings_of, ucx_library

_FEATURES_FIELD, _RMA = 1, 2
_PARAMS_WORDS = 64
"""Words of ``ucp_params_t``: more than any version of UCX has; the first two are used."""

_RESOURCE = "flags "


def possible_transports(ucx: Mapping[str, str], net_devices: Sequence[str] = ()) -> tuple[str, ...]:
    """Transports and devices, like ``tcp/eth0``; empty where UCX does not report them.

    Args:
        ucx: the parameters of NIXL's UCX backend.
        net_devices: the network devices that it is restricted to (``restricted_to``).
    """
    library = ucx_library()
    if library is None:
        return ()
    with suppress(OSError, AttributeError, RuntimeError):
        listed = {"NET_DEVICES": ",".join(net_devices)} if net_devices else {}
        return parse(_printed(library, settings_of(ucx) | listed))
    return ()


def parse(printed: str) -> tuple[str, ...]:
    """The resources in UCX's description of a context.

    >>> parse("#      resource 1  :  md 1  dev 1  flags -- tcp/eth0")
    ('tcp/eth0',)
    """
    lines = (line.partition(_RESOURCE) for line in printed.splitlines() if " resource " in line)
    return tuple(rest.split()[-1] for _, found, rest in lines if found and rest.split())


def _printed(ucp: ctypes.CDLL, settings: Mapping[str, str]) -> str:
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    context = _context(ucp, settings)
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    try:
        stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
        if not stream:
            raise RuntimeError("no memory")
        ucp.ucp_context_print_info(context, stream)
        libc.fclose(stream)
        return ctypes.string_at(text, size.value).decode(errors="replace")
    finally:
        libc.free(text)
        ucp.ucp_cleanup(context)


def _context(ucp: ctypes.CDLL, settings: Mapping[str, str]) -> ctypes.c_void_p:
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if ucp.ucp_config_read(None, None, ctypes.byref(config)):
        raise RuntimeError("ucp_config_read")
    for name, value in settings.items():
        ucp.ucp_config_modify(config, name.encode(), value.encode())
    params = (ctypes.c_uint64 * _PARAMS_WORDS)(_FEATURES_FIELD, _RMA)
    failed = ucp.ucp_init_version(major, minor, ctypes.byref(params), config, ctypes.byref(context))
    ucp.ucp_config_release(config)
    if failed:
        raise RuntimeError("ucp_init")
    return context
