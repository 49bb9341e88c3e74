"""How much of a prompt comes from which source: bytes over measured bandwidth.

A lender has all of a prompt, and a store its beginning.  What is loaded need not cross the network,
so as much as possible is, as long as that takes no longer than pulling everything would::

    held        split                                until
    ├──────────────┼───────────────────────────────────┤
    │ store: load  │ lender: pull                      │      both at the same time
    └─ at most ────┴─ (until - held) / pull bandwidth ─┘

Pure: time is an argument.
"""

from __future__ import annotations

LEAST_NBYTES = 1 << 20
"""Less takes a fixed time, and says little of how long more takes."""
FORGET_S = 60.0
"""A source that was slow once is tried again after so long."""
_WEIGHT = 0.3


class Bandwidth:
    """Bytes per second of one source, as last seen by one reader."""

    __slots__ = ("_bytes_per_s", "_seen_at")

    def __init__(self) -> None:
        self._bytes_per_s = 0.0
        self._seen_at = float("-inf")

    def learn_read(self, nbytes: int, seconds: float, now: float) -> None:
        """So many bytes took so long, of which waiting for other readers is a part."""
        if nbytes < LEAST_NBYTES or seconds <= 0:
            return
        seen, before = nbytes / seconds, self.bytes_per_s(now)
        self._bytes_per_s = seen if before is None else before + _WEIGHT * (seen - before)
        self._seen_at = now

    def bytes_per_s(self, now: float) -> float | None:
        """None if nothing was read of late."""
        return self._bytes_per_s if now - self._seen_at < FORGET_S else None


def split_at(tokens: range, stored: int, load: float | None, pull: float | None) -> int:
    """Where the pull begins, if both sources are read at the same time.

    Args:
        tokens: that are not held; the lender has all of them.
        stored: the store has those before.
        load, pull: bytes per second of the store and of the lender; None if unknown.

    Returns:
        Tokens of the prompt, at least ``tokens.start``, at most ``stored``.

    >>> split_at(range(0, 1000), 900, load=2e9, pull=1e9)
    900
    >>> split_at(range(0, 1000), 900, load=1e9, pull=4e9)
    250
    """
    stored = max(tokens.start, min(stored, tokens.stop))
    if load is None or pull is None or load >= pull:
        return stored
    return min(stored, tokens.start + int(len(tokens) * load / pull))


def is_store_enough(
    tokens: range, stored: int, least: int, load: float | None, pull: float | None
) -> bool:
    """Whether a store loads a prompt alone, of which a lender has a prefix.

    It has all that the lender has, and either as much more that computing it would take longer
    than a load, or it is read as fast.

    Args:
        tokens: of the prefix that are not held.
        stored: the store has a whole prefix of so many tokens.
        least: tokens that are worth a load.
        load, pull: as for :func:`split_at`.

    >>> is_store_enough(range(0, 1000), 1024, 64, load=1e9, pull=4e9)
    False
    """
    more = stored - tokens.stop
    return more >= 0 and (more >= least or split_at(tokens, stored, load, pull) == tokens.stop)
