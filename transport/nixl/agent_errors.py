"""NIXL's exceptions, turned into the transport's.

NIXL raises a dozen classes without a common base class below ``Exception``, so the classes to catch
are collected from its module, and distinguished by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transport.errors import BackendFailure, BadAddress, OutOfBounds, PeerLost, TransportError

ErrorClasses = tuple[type[Exception], ...]
Kinds = Mapping[str, type[TransportError]]


class ChangedConnection(BadAddress):
    """A known peer has another address: it was restarted under its old name."""


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
"""Errors of loading metadata: in every case the address cannot be used."""

_ALWAYS: Kinds = {"nixlRemoteDisconnectError": PeerLost}

Mapped = Callable[..., AbstractContextManager[None]]


def error_classes(bindings: Any) -> ErrorClasses:
    """Every exception class that NIXL raises for failures.

    It raises RuntimeError for statuses without a class of their own, and ValueError for arguments
    that its bindings refuse.
    """
    own = [
        value
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and isinstance(value, type) and issubclass(value, Exception)
    ]
    return (*own, RuntimeError, ValueError)


def mapper(errors: ErrorClasses) -> Mapped:
    """A context manager that maps ``errors``: ``with mapped("register x", UNREGISTERED): …``.

    Classes that ``kinds`` does not name become ``PeerLost`` for a disconnect and
    ``BackendFailure`` otherwise; NIXL's exception is the cause.
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

    For calls that every read makes: entering a context manager costs more than the rest of it.
    """
    name = type(error).__name__
    kind = {**_ALWAYS, **(kinds or {})}.get(name, BackendFailure)
    return kind(f"{doing}: {name}: {error}")
