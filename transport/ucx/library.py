"""UCXX, imported late, with its settings and exceptions kept at this edge.

Three oddities of ucxx 0.52 are dealt with here:

* Its loader loads the UCX of its wheels only if ``librmm`` is there as well, a
  CUDA package that moving host memory does not need.  So UCX is loaded first.
* Importing it sets UCX variables in this process's environment, which NIXL's
  own UCX beside it and every child process would inherit.  They are removed again;
  our settings are passed to our context alone.
* All of its failures derive from one class, ``UCXError``.

UCX takes a setting from, in this order: the environment (``UCX_…``), the user's
options, ours.  ``FIXED`` can be changed by neither, as safety rests on it.
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
"""All of UCX's transports but those over shared memory.

With handling of peer failures switched on, which we need, UCX leaves most of them out
by itself; through CMA a *lender* may write into the reader's memory, which closing
the reader's connection would not end.

Segments: with 1 M instead of 256 K, reads of 1 MiB blocks over TCP went from 0.69 to
0.94 of NIXL's speed (medians of 9 rounds in turn, on two busy cores).

Runs that one call of the system sends: with 256 instead of 6, runs of 1000 bytes went from
0.23 to 0.44 GB/s over TCP.
"""

EAGER_BYTES = 8192
"""Messages below this many bytes travel in one packet on every transport of UCX."""

FIXED = {"RNDV_THRESH": str(EAGER_BYTES), "RCACHE_ENABLE": "y"}
"""Settings that nothing changes, not even the environment.

``RNDV_THRESH``: larger messages are announced first.  An unannounced message of several
packets would leave its receive pending for ever if the sender dies midway.

``RCACHE_ENABLE``: UCX starts with a registration cache or not at all.  Its own
default goes on without one where its memory hooks do not work or are switched off
(``UCX_MEM_EVENTS=n``, ``UCX_MEM_MMAP_HOOK_MODE=none``), and then a peer that dies
while an announced message is under way to it makes UCX up to 1.21 follow a null
pointer: when a reader dies, its lender crashes (openucx/ucx issue 11467).
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
"""What says that a peer is lost: UCXX's exceptions, and UCX's ``ucs_status_t`` behind them."""


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
    before = {key for key in os.environ if key.startswith("UCX_")}
    try:
        with suppress(ModuleNotFoundError):  # no wheel: UCX comes from the system
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
    """What to configure UCX with: ``user`` over our defaults, without what the environment sets.

    Raises:
        ValueError: an option that must stay as it is.
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
