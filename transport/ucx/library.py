"""UCXX, imported late, with its settings and exceptions.

UCX takes a setting from the environment (``UCX_…``), else from the user's options, else from ours.
``FIXED`` cannot be changed, since safety depends on it.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from transport.errors import BackendFailure, PeerLost, TransportError, TransportUnavailable

DEFAULTS = {
    "TLS": "^cma,knem,xpmem,posix,sysv",
    "TCP_TX_SEG_SIZE": "1M",
    "TCP_RX_SEG_SIZE": "1M",
    "TCP_MAX_IOV": "256",
}
"""``TLS``: all of UCX's transports but those over shared memory.  With handling of peer failures
enabled, which we need, UCX leaves out most of them; through CMA a *lender* may write into the
reader's memory, which closing the reader's connection would not end.

``…_SEG_SIZE``: with 1 M instead of 256 K, reads of 1 MiB blocks over TCP went from 0.69 to 0.94 of
NIXL's speed (medians of 9 rounds in turn, on two busy cores).

``TCP_MAX_IOV``, runs per system call: with 256 instead of 6, runs of 1000 bytes went from 0.23 to
0.44 GB/s over TCP.
"""

EAGER_BYTES = 8192
"""Messages below this many bytes travel in one packet on every transport of UCX."""

FIXED = {"RNDV_THRESH": str(EAGER_BYTES), "RCACHE_ENABLE": "y"}
"""Settings that nothing overrides, not even the environment.

``RNDV_THRESH``: larger messages are announced first.  An unannounced message of several
packets would leave its receive pending for ever if the sender died before the last one.

``RCACHE_ENABLE``: UCX starts with a registration cache or not at all.  By default it starts without
one if its memory hooks do not work or are disabled (``UCX_MEM_EVENTS=n``,
``UCX_MEM_MMAP_HOOK_MODE=none``), and then UCX up to 1.21 dereferences a null pointer when a peer
dies while an announced message is sent to it: when a reader dies, its lender crashes (openucx/ucx
issue 11467).
"""

_LOST: dict[str, int | None] = {
    "UCXConnectionResetError": -25,
    "UCXEndpointTimeoutError": -80,
    "UCXUnreachableError": -6,
    "UCXNotConnectedError": -24,
    "UCXRejectedError": -23,
    "UCXCanceledError": -16,
    "UCXCloseError": None,
    "UCXIOError": -3,
    "UCXTimedOutError": -20,
}
"""Errors of a lost peer: UCXX's exceptions, and the corresponding ``ucs_status_t`` of UCX."""


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """The parts of ucxx that are needed: its Cython module and its buffer wrapper."""

    api: Any
    array: Any
    version: str
    ucx_version: str

    @contextmanager
    def mapped(self, doing: str) -> Iterator[None]:
        """Turn ucxx's exceptions into ``PeerLost`` or ``BackendFailure``."""
        try:
            yield
        except self.api.UCXError as error:
            raise self._kind(error)(f"{doing}: {error}") from error

    @staticmethod
    def failure(status: int, text: str) -> TransportError:
        """The error for a failed request's ``ucs_status_t``, of the kind that ``mapped`` raises."""
        return (PeerLost if status in _LOST.values() else BackendFailure)(text)

    def _kind(self, error: Exception) -> type[TransportError]:
        lost = tuple(getattr(self.api, name) for name in _LOST)
        return PeerLost if isinstance(error, lost) else BackendFailure


def load_library() -> UcxLibrary:
    """Import ucxx, which takes half a second the first time.

    Raises:
        TransportUnavailable: it is not installed, or does not load here.
    """
    # Importing ucxx sets UCX variables in the environment, which NIXL's own UCX and child processes
    # would inherit.  They are removed again; our settings are passed to our context.
    before = {key for key in os.environ if key.startswith("UCX_")}
    try:
        # ucxx loads the UCX of its wheels only beside ``librmm``, a CUDA package that host memory
        # does not need.  So UCX is loaded first.
        with suppress(ModuleNotFoundError):  # no wheel: the system's UCX
            import libucx

            libucx.load_library()
        import ucxx
        from ucxx._lib import libucxx as api
        from ucxx._lib.arr import Array
    except (ImportError, OSError) as error:
        raise TransportUnavailable(
            f"ucxx cannot be imported: {error}. Install pdconn[ucx]; ucxx needs Linux"
        ) from error
    finally:
        for key in [key for key in os.environ if key.startswith("UCX_")]:
            if key not in before:
                del os.environ[key]
    return UcxLibrary(api, Array, _version("ucxx-cu12"), ".".join(map(str, ucxx.get_ucx_version())))


def context_options(user: Mapping[str, str] | None) -> dict[str, str]:
    """Settings for UCX: ``user`` over our defaults, without those that the environment sets.

    Raises:
        ValueError: an option that cannot be changed.
    """
    given = {key.removeprefix("UCX_"): str(value) for key, value in (user or {}).items()}
    for key, value in FIXED.items():
        if given.get(key, value) != value:
            raise ValueError(f"UCX option {key}: must be {value}, got {given[key]}")
    merged = {**DEFAULTS, **given}
    return {k: v for k, v in merged.items() if f"UCX_{k}" not in os.environ} | FIXED


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
