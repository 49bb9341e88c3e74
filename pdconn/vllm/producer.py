"""The scheduler's part of a prefill engine: lends finished prompts, frees them later.

Lent blocks are pinned by a reference of our own in the engine's block pool, and the
request itself ends at once.  The other way, which vLLM offers too, is to keep
the finished request; but then the engine steps a thousand times a second for as long
as anything is lent, and its idle spinning takes the cores that decode needs.

References are dropped on the engine's thread only, when a request arrives or a step
is scheduled.  An idle engine therefore shows lent blocks as used until then.
"""

from __future__ import annotations

import logging
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


class ProducerScheduler:
    """Leases of one prefill engine.

    Args:
        settings: checked settings.
        engine_id: the engine's name in tickets.
        incarnation: this boot's name in tickets.
        sizes: TP and PP size, put in tickets for proxies that look.
    """

    def __init__(
        self, settings: Settings, engine_id: str, incarnation: str, sizes: tuple[int, int]
    ) -> None:
        self._settings = settings
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._sizes = sizes
        self._lender: Lender | None = None
        self._pool: Any = None
        self._pinned: dict[str, list[Any]] = {}
        self._to_sum: list[tuple[Terms, tuple[BlockList, ...]]] = []

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in."""
        self._pool = block_pool

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
