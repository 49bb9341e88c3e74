"""The scheduler's part of a prefill engine: lends finished prompts, frees them later.

Lent blocks are pinned by a reference of our own in the engine's block pool, and the
request itself ends at once.  The other way, which vLLM offers too, is to keep
the finished request; but then the engine steps a thousand times a second for as long
as anything is lent, and its idle spinning takes the cores that decode needs.

References are dropped on the engine's thread only: when a request arrives, when a step is
scheduled, and before the prefix cache is reset.  An idle engine therefore shows lent
blocks as used until then.

A reset clears KV that may be wrong from then on, as after new weights, so nothing lent before it
may be read after it: everything lent is taken back first.  An engine that was asked to stop
lends on until its leases have ended, if it was given time for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from pdconn.integrity.lent import LentSums
from pdconn.integrity.sums import Terms
from pdconn.lender.server import Lender
from pdconn.protocol.messages import Welcome
from pdconn.protocol.ticket import BlockList, Ticket, trimmed
from pdconn.puller.verification import Verify
from pdconn.vllm.config import Settings
from pdconn.vllm.prompt import EMBEDDINGS, has_embeddings, prompt_digest

log = logging.getLogger(__name__)

_RESET_S = 1.0
"""How long a reset waits for what is being read; it is revoked after that."""

_LOOK_S = 0.02
"""A draining engine looks that often whether its leases have ended, instead of spinning."""


class ProducerScheduler:
    """Leases of one prefill engine.

    Args:
        settings: checked settings.
        engine_id: the engine's name in tickets.
        incarnation: this boot's name in tickets.
        sizes: TP and PP size, put in tickets for proxies that look.
        drain_s: how long an engine that was asked to stop waits for its leases.
    """

    def __init__(
        self,
        settings: Settings,
        engine_id: str,
        incarnation: str,
        sizes: tuple[int, int],
        drain_s: float = 0.0,
    ) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._sizes = sizes
        self._drain_s = drain_s
        self._drains_until: float | None = None
        self._lender: Lender | None = None
        self._pool: Any = None
        self._pinned: dict[str, list[Any]] = {}
        self._to_sum: list[tuple[Terms, tuple[BlockList, ...]]] = []

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in, and take them back before it is reset."""
        self._pool = block_pool
        resetting = block_pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self.take_back()
            return bool(resetting())

        block_pool.reset_prefix_cache = reset_prefix_cache

    def serve(self, welcome: Welcome) -> None:
        """Start the side channel, once every worker is registered.

        Raises:
            SideChannelInUse: the port is taken.
            Unprotected: it is reachable from elsewhere without secret or TLS.
        """
        host, port = self._settings.side_channel_host, self._settings.side_channel_port
        self._lender = Lender(
            welcome,
            host,
            port,
            security=self._settings.security,
            is_summing=self._settings.verify is not Verify.OFF,
        )
        log.info("pdconn: lending %d rank(s) at %s:%d", len(welcome.ranks), host, port)

    def lend(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """Pin and lend a finished request's blocks; the ticket, or None without blocks."""
        if self._lender is None or not any(any(ids) for ids in block_ids):
            return None
        if request.request_id in self._pinned:
            log.warning("pdconn: not lent, it has a lease already: request=%s", request.request_id)
            return None
        if has_embeddings(request):
            log.warning("pdconn: not lent: %s: request=%s", EMBEDDINGS, request.request_id)
            return None
        held = [self._pool.blocks[block] for ids in block_ids for block in ids if block]
        self._pool.touch(held)
        self._pinned[request.request_id] = held
        blocks = tuple(trimmed(ids) for ids in block_ids)
        ticket = Ticket(
            self._engine_id,
            self._incarnation,
            request.request_id,
            self._settings.side_channel_host,
            self._settings.side_channel_port,
            request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0),
            prompt_digest(request),
            blocks,
        )
        ttl_s = self._settings.kv_lease_duration
        self._lender.lend(request.request_id, ticket.digest(), ttl_s)
        verify = self._settings.verify
        if verify is not Verify.OFF:
            terms = Terms(request.request_id, ticket.num_tokens, verify is Verify.SAMPLE)
            self._to_sum.append((terms, blocks))
        return ticket.to_params(*self._sizes)

    def unpin_freed(self) -> None:
        """Unpin blocks whose leases have ended.  Only on the engine's thread."""
        if self._lender is None:
            return
        for lease in self._lender.collect():
            log.debug("pdconn: unpinned: request=%s why=%s", lease.request, lease.why)
            # Tail first, so that the head of a prefix stays cached the longest.
            self._pool.free_blocks(reversed(self._pinned.pop(lease.request)))

    def take_back(self) -> None:
        """End every lease and unpin its blocks.  Only on the engine's thread, which waits.

        Unclaimed leases end at once; what is being read gets a second, and is not confirmed
        after that.
        """
        if self._lender is None:
            return
        self.unpin_freed()
        if not self._pinned:
            return
        log.info("pdconn: cache reset: taking back what is lent: leases=%d", len(self._pinned))
        self._lender.abort_all()
        if self._unpinned_within(_RESET_S):
            return
        log.warning("pdconn: cache reset: revoking leases being read: leases=%d", len(self._pinned))
        self._lender.revoke_all()
        if not self._unpinned_within(_RESET_S):
            log.error("pdconn: cache reset: still lent: leases=%d", len(self._pinned))

    def drain(self) -> bool:
        """Whether an engine that was asked to stop must still wait for its leases.

        Waits a little itself, since vLLM asks again at once.  Only on the engine's thread.
        """
        self.unpin_freed()
        if not self._pinned:
            return False
        now = time.monotonic()
        if self._drains_until is None:
            self._drains_until = now + self._drain_s
            log.info("pdconn: draining: leases=%d at_most_s=%g", len(self._pinned), self._drain_s)
        if now >= self._drains_until:
            log.warning("pdconn: stopping with leases unread: leases=%d", len(self._pinned))
            return False
        time.sleep(_LOOK_S)
        return True

    def _unpinned_within(self, seconds: float) -> bool:
        give_up = time.monotonic() + seconds
        while self._pinned and time.monotonic() < give_up:
            time.sleep(0.001)
            self.unpin_freed()
        return not self._pinned

    def take_sums(self) -> list[tuple[Terms, tuple[BlockList, ...]]]:
        """What workers are to sum in this step: every finished request has one to come."""
        to_sum, self._to_sum = self._to_sum, []
        return to_sum

    def add_sums(self, sums: Sequence[tuple[str, int, LentSums | None]]) -> None:
        """Workers have summed: request, rank, sums."""
        if self._lender is not None:
            for request, rank, summed in sums:
                self._lender.add_sums(request, rank, summed)

    def take_counts(self) -> dict[str, int]:
        """What the side channel counted since the last call."""
        return {} if self._lender is None else self._lender.take_counts()

    def close(self) -> None:
        """Stop the side channel."""
        if self._lender is not None:
            self._lender.close()
            self._lender = None
