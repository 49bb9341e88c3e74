"""Blocks in use, of engines that say so only while they work.  Pure.

vLLM counts its blocks when it takes a step.  A prefill engine that has lent blocks and then
has nothing to do goes on saying that they are in use, long after their leases have ended.
So what an idle engine says is believed for as long as a lease may last, and no longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LEASE_S = 30.0
"""vLLM's default; a longer lease makes an idle engine look free a little early."""


@dataclass(slots=True)
class KvUsage:
    """When each idle engine first said what it still says."""

    _said: dict[str, tuple[float, float]] = field(default_factory=dict)

    def hear(self, engine: str, share: float, *, idle: bool, now: float) -> float:
        """Note what an engine says; returns the share of its blocks in use, as far as known."""
        if not idle:
            self._said.pop(engine, None)
            return share
        said, since = self._said.setdefault(engine, (share, now))
        if said != share:
            since = now
            self._said[engine] = (share, now)
        return share if now - since < LEASE_S else 0.0

    def keep(self, engines: tuple[str, ...]) -> None:
        """Forget all other engines."""
        self._said = {name: said for name, said in self._said.items() if name in engines}
