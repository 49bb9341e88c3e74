"""NIXL's exceptions, turned into the transport's.

NIXL raises a dozen classes that share no base class below ``Exception``, so
the classes to catch are collected from its module, and distinguished by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transport.errors import BackendFailure, BadAddress, OutOfBounds, PeerLost, TransportError

ErrorClasses = tuple[type[Exception], ...]
Kinds = Mapping[str, type[TransportError]]


class ChangedConnection(BadAddress):
    """A known peer's address leads elsewhere now: it was restarted under its old name."""


INVALIDATED: Kinds = {"nixlNotFoundError": PeerLost}
"""Newer NIXL forgets a peer by itself once one READ finds it disconnected; its other
READs then report "not found".  They have ended, as one endpoint carried all of them."""

UNREGISTERED: Kinds = {"nixlNotFoundError": OutOfBounds}
"""Descriptors outside registered memory are "not found", too."""

UNLOADABLE: Kinds = {
    "nixlMismatchError": BadAddress,
    "nixlNotFoundError": BadAddress,
    "nixlInvalidParamError": BadAddress,
    "nixlBackendError": BadAddress,  # no backend in common
    "nixlNotAllowedError": ChangedConnection,
}
"""How loading metadata can fail: in every case the address cannot be used."""

_ALWAYS: Kinds = {"nixlRemoteDisconnectError": PeerLost}

Mapped = Callable[..., AbstractContextManager[None]]


def error_classes(bindings: Any) -> ErrorClasses:
    """Every exception class that NIXL raises for failures.

    RuntimeError stands for statuses that have no class of their own, ValueError
    for arguments that its bindings refuse.
    """
    own = [
        value
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    ]
    return (*own, RuntimeError, ValueError)


def mapper(errors: ErrorClasses) -> Mapped:
    """A context manager that maps ``errors``: ``with mapped("register x", UNREGISTERED): …``.

    What ``kinds`` does not name becomes ``PeerLost`` for a disconnect and
    ``BackendFailure`` otherwise; NIXL's own exception stays as the cause.
    """

    @contextmanager
    def mapped(doing: str, kinds: Kinds | None = None) -> Iterator[None]:
        try:
            yield
        except errors as error:
            raise as_ours(error, doing, kinds) from error

    return mapped


def as_ours(error: Exception, doing: str, kinds: Kinds | None = None) -> TransportError:
    """The transport's error for one of NIXL's, as :func:`mapper` raises it.

    For what is called for every read: entering a context manager costs more than the rest of it.
    """
    name = type(error).__name__
    kind = {**_ALWAYS, **(kinds or {})}.get(name, BackendFailure)
    return kind(f"{doing}: {name}: {error}")
