"""Errors of invalid input (:class:`FieldError`), and of transports.

Backends map their own exceptions to these at the edge, so that nothing above a transport imports
nixl or ucxx.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Self


class FieldError(Exception):
    """A value is invalid: ``field`` was ``seen`` where ``expected`` was needed.

    Base of every error of invalid input, on the command line, in configuration and on the wire,
    so that a log line or an HTTP body can show all three.  ``show`` formats what was seen.
    """

    show: ClassVar[Callable[[object], str]] = str

    def __init__(self, field: str, expected: object, seen: object, hint: str = "") -> None:
        self.field = field
        self.expected = expected
        self.seen = seen
        self.hint = hint
        tail = f"; {hint}" if hint else ""
        super().__init__(f"{field}: expected {expected}, got {type(self).show(seen)}{tail}")

    def __reduce__(self) -> tuple[Any, ...]:
        """The error as another process raises it again, without ``__init__``.

        By default an exception is made of its ``args``, here of the whole text.
        """
        return _remade, (type(self), self.args, self.__dict__)

    def prefixed(self, owner: str) -> Self:
        """The same error with a longer path to its field: ``owner``, with a separator, precedes it.

        >>> print(FieldError("tp", "a number above 0", 0).prefixed("--prefill "))
        --prefill tp: expected a number above 0, got 0
        """
        return type(self)(f"{owner}{self.field}", self.expected, self.seen, self.hint)


def _remade(kind: type[FieldError], args: tuple[Any, ...], fields: dict[str, Any]) -> FieldError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(fields)
    return error


_NEAR = 0.7
"""Below this ratio keys only share letters: 'rehearse' and 'lease', '--store' and '--picture'."""


def did_you_mean(key: str, known: Iterable[str], what: str = "keys") -> str:
    """The hint for an unknown key: the nearest of ``known``, or all of them if none is near.

    A key is near by its spelling, or if it alone has all words of ``key``.

    >>> did_you_mean("backend", ["backends", "verify"])
    "did you mean 'backends'?"
    >>> did_you_mean("lease", ["rehearse", "kv_lease_duration"])
    "did you mean 'kv_lease_duration'?"
    >>> did_you_mean("foo", ["block", "tp"])
    'known keys: block, tp'
    """
    names = list(known)
    wanted = _words(key)
    near = difflib.get_close_matches(key, names, n=1, cutoff=_NEAR)
    if not near and wanted:
        having = [name for name in names if wanted <= _words(name)]
        near = having if len(having) == 1 else []
    return f"did you mean {near[0]!r}?" if near else f"known {what}: {', '.join(names)}"


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def shown(value: object, limit: int = 80) -> str:
    """``value`` for an error text: its repr, shortened to ``limit`` characters.

    Values from a peer or a client may be of any size and depth; no more of them is read than is
    shown.  An integer that is too long to be shown is given by its size, since Python refuses to
    format one of more than 4300 digits.

    >>> shown([1, "a", 10**5000])
    "[1, 'a', <integer of 16610 bits>]"
    """
    text = ""
    for piece in _pieces(value, limit):
        text += piece
        if len(text) > limit:
            return text[: limit - 3] + "..."
    return text


def _pieces(value: object, limit: int) -> Iterator[str]:
    """The repr of ``value`` from its beginning; every level of nesting adds a character."""
    if type(value) is dict:
        yield "{"
        for number, (key, each) in enumerate(value.items()):
            yield ", " if number else ""
            yield from _pieces(key, limit)
            yield ": "
            yield from _pieces(each, limit)
        yield "}"
    elif type(value) is list:
        yield "["
        for number, each in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(each, limit)
        yield "]"
    elif type(value) is int and value.bit_length() > 4 * limit:
        yield f"<integer of {value.bit_length()} bits>"
    elif isinstance(value, str | bytes):
        yield repr(value[: limit + 1])
    else:
        yield repr(value)


class TransportError(Exception):
    """Base of everything a transport raises or settles a read with."""


class BadSpans(TransportError, ValueError):
    """Our own request is invalid: wrong dtype, shape, length or address."""


class OutOfBounds(TransportError):
    """A span leaves the registered memory, on either side."""


class BadAddress(TransportError):
    """The bytes are no address with which a peer can be reached."""


class PeerUnknown(TransportError):
    """The peer was never connected, or has been disconnected."""


class PeerLost(TransportError):
    """The connection to the peer is lost; reads in flight from it have failed."""


class BackendFailure(TransportError):
    """The backend has refused a call or failed for a reason of its own."""


class TransportUnavailable(TransportError):
    """The backend cannot run here: a missing library, plugin or device."""


class TransportClosed(TransportError):
    """The transport was closed before this call."""
