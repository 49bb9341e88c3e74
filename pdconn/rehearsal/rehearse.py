"""One whole pull between two transports of this process, over a side channel on loopback.

The first pull of a process loads and builds what later ones find: UCX picks its protocols with
an agent's first connection (10 to 20 ms), the first READ opens an endpoint, Python runs every
path for the first time.  A rehearsal is that first pull, with the code and the transport that
pulls use, and with memory that holds nothing::

    Puller ── hello, claim, confirm, checksums, done ──► Lender on 127.0.0.1, a secret of its own
      │ reads a block of a scratch page                     │
    transport A ◄────────────── one-sided READ ──────── transport B

What depends on the peer (its connection, its endpoint, its template) is not rehearsed: that is
what ``warm_peers`` is for.  TLS is left out, since no certificate names loopback.
"""

from __future__ import annotations

import secrets
import time
from contextlib import closing
from dataclasses import dataclass

from pdconn.integrity.lent import lent_sums
from pdconn.integrity.memory import AnyMemory
from pdconn.integrity.sums import Terms
from pdconn.lender.server import Lender
from pdconn.lifecycle.pull import Patience
from pdconn.planning.plan import Need
from pdconn.protocol.auth import Secret
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller
from pdconn.puller.verification import Verify
from pdconn.sidechannel.security import Security
from registration.references import (
    AttentionKind,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
    KVCacheTensorReference,
)
from registration.scratch import PAGE_NBYTES, Scratch
from transport import HOST, Memory, PeerId, Transport
from transport.forwarding import ForwardingTransport

LIMIT_S = 5.0
"""How long a rehearsal may take until its read has settled; closing is bounded by the puller."""

_HOST = "127.0.0.1"
_NAME = "rehearsal"
_TTL_S = 60.0
_BLOCK_TOKENS, _TOKEN_NBYTES = 16, 16
_BLOCK_NBYTES = _BLOCK_TOKENS * _TOKEN_NBYTES
_TRAITS = {"model": _NAME}


class BorrowedTransport(ForwardingTransport):
    """``close`` disconnects from the peers connected here, and no more.

    Args:
        owner: the transport; nobody else uses it meanwhile.
    """

    def __init__(self, owner: Transport) -> None:
        super().__init__(owner)
        self._peers: dict[PeerId, None] = {}

    def connect(self, address: bytes) -> PeerId:
        peer = super().connect(address)
        self._peers[peer] = None
        return peer

    def disconnect(self, peer: PeerId) -> None:
        self._peers.pop(peer, None)
        super().disconnect(peer)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)


class RehearsalFailed(RuntimeError):
    """The pull from ourselves did not succeed; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedTransport:
    """A transport with a page of host memory registered, which must outlive the transport."""

    transport: Transport
    page: Scratch

    @classmethod
    def on(cls, transport: Transport) -> PagedTransport:
        """Register a new page.

        Raises:
            TransportError: it cannot be registered.
        """
        page = Scratch.on(HOST)
        transport.register([page.memory])
        return cls(transport, page)


def rehearse(reader: PagedTransport, lender: PagedTransport, limit_s: float | None = None) -> None:
    """Pull a block from ``lender``'s page into ``reader``'s, checksums included.

    Both transports stay open, and disconnected from each other.

    Raises:
        RehearsalFailed: the pull failed, or took longer than ``limit_s`` (``LIMIT_S``).
        OSError: loopback cannot be listened at.
        TransportError: no address.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    security = Security(Secret(secrets.token_bytes(32)))
    boot, request = secrets.token_hex(8), _NAME
    lent = _references(lender.page.memory)
    geometry = RankGeometry(0, 0, lender.transport.address(), lent)
    welcome = Welcome.in_our_version(_NAME, boot, _TRAITS, (geometry,))
    blocks = (BlockList(0, (1,)),)
    with closing(Lender(welcome, _HOST, 0, security=security, is_summing=True)) as serving:
        ticket = Ticket(_NAME, boot, request, _HOST, serving.port, _BLOCK_TOKENS, _NAME, blocks)
        serving.lend(request, ticket.digest(), _TTL_S)
        terms = Terms(request, _BLOCK_TOKENS, sampled=False)
        serving.add_sums(request, 0, lent_sums(AnyMemory(), lent, blocks, terms))
        me = Rank(f"{_NAME}-reader", 0, 1, 0, _references(reader.page.memory), _TRAITS)
        with closing(
            Puller(
                me,
                BorrowedTransport(reader.transport),
                patience=Patience(limit_s, limit_s, limit_s),
                verify=Verify.ALWAYS,
                security=security,
            )
        ) as puller:
            puller.post_command(ClaimTicket(request, f"{_NAME}/{boot}", ticket))
            puller.post_command(ReadBlocks(request, Need.of(0, _BLOCK_TOKENS, blocks)))
            _await_report(puller, limit_s)


def _await_report(puller: Puller, limit_s: float) -> None:
    give_up = time.monotonic() + limit_s
    while time.monotonic() < give_up:
        results = puller.take_results()
        if results.failed:
            raise RehearsalFailed(results.failed[0].reason)
        if results.records:
            return
        puller.wait_for_report(0.05)
    raise RehearsalFailed(f"not pulled within {limit_s:g} s")


def _references(page: Memory) -> KVCacheReferences:
    """The page as blocks of one layer of full attention."""
    row = KVCacheDataReference(
        layer="rehearsal",
        chunk=0,
        tensor=0,
        offset=0,
        nbytes=_BLOCK_NBYTES,
        num_heads=1,
        first_head=0,
        head_stride=_BLOCK_NBYTES,
        token_stride=_TOKEN_NBYTES,
        token_nbytes=_TOKEN_NBYTES,
    )
    num_blocks = PAGE_NBYTES // _BLOCK_NBYTES
    tensor = KVCacheTensorReference(page.base, page.nbytes, num_blocks, _BLOCK_NBYTES)
    group = KVCacheGroupReference(AttentionKind.FULL, None, _BLOCK_TOKENS, (row,))
    return KVCacheReferences((tensor,), (group,))
