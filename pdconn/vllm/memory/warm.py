"""What a worker does before its first request, so that it finds its way prepared.

The first pull of a process loads and builds what later ones find: UCX picks its protocols with
an agent's first connection (10 to 20 ms), the first READ opens an endpoint, Python runs every
path for the first time.  A *rehearsal* is that first pull, from ourselves: an ordinary pull with a
ticket, by the puller and the lender of all pulls, between two transports of this process::

    Puller ── hello, claim, confirm, checksums, done ──► Lender on 127.0.0.1, a secret of its own
      │ reads a block of a scratch page                     │
    transport A ◄────────────── one-sided READ ──────── transport B

What depends on the peer (its connection, its endpoint, its template) cannot be rehearsed: that
is what ``warm_peers`` is for (:mod:`pdconn.puller.warmup`).  TLS is left out, since no
certificate names loopback.  Both fail softly: the first request is slower then.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
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
from pdconn.puller.warmup import Place, WarmUp
from pdconn.sidechannel.security import Security
from registration.references import (
    AttentionKind,
    KVCacheDataReference,
    KVCacheGroupReference,
    KVCacheReferences,
    KVCacheTensorReference,
)
from registration.scratch import PAGE_NBYTES, Scratch
from transport import HOST, Device, Memory, PeerId, Transport, TransportError
from transport.forwarding import ForwardingTransport

log = logging.getLogger(__name__)

BackendOptions = Mapping[str, Mapping[str, str]]

_NETWORK_ONLY = "TLS=^sm"

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
    """A transport with a page registered, which must outlive the transport."""

    transport: Transport
    page: Scratch

    @classmethod
    def on(cls, transport: Transport, device: Device = HOST) -> PagedTransport:
        """Register a new page on ``device``.

        Raises:
            MemoryError: a GPU that has none to spare.
            TransportError: it cannot be registered.
        """
        page = Scratch.on(device)
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
            puller.post_command(ReadBlocks(request, Need.for_range(0, _BLOCK_TOKENS, blocks)))
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


def rehearse_pulls(
    transport: Transport, partners: Sequence[Callable[[], Transport]], *, lends: bool, pulls: bool
) -> list[object]:
    """Pull from, and lend to, a transport that each of ``partners`` opens for it; closed again.

    Returns what must live as long as ``transport``: pages that are registered with it.
    """
    began = time.monotonic()
    kept: list[object] = []
    try:
        ours = PagedTransport.on(transport)
        kept.append(ours.page)
        for open_partner in partners:
            partner = open_partner()
            kept.append(partner)  # until it is closed nothing of it may be collected
            theirs = PagedTransport.on(partner)
            kept.append(theirs.page)
            if pulls:
                rehearse(ours, theirs)
            if lends:
                rehearse(theirs, ours)
            partner.close()
            del kept[1:]
    except Exception as error:  # noqa: BLE001 - an engine that can serve must start
        log.warning(
            "pdconn: the rehearsal failed, so the first request takes longer: %s: %s",
            type(error).__name__,
            error,
        )
    else:
        log.info(
            "pdconn: rehearsed: lends=%s pulls=%s partners=%d seconds=%.3f",
            lends,
            pulls,
            len(partners),
            time.monotonic() - began,
        )
    return kept


def network_only(
    options: BackendOptions, environ: Mapping[str, str] = os.environ
) -> BackendOptions | None:
    """UCX options of a partner that is reached as one on another host is: without shared memory.

    UCX picks its protocols once for each kind of connection.  None where the user's own list
    of transports decides.

    >>> network_only({}, {})
    {'UCX': {'engine_config': 'TLS=^sm'}}
    """
    ours = options.get("UCX", {})
    settings = [word for word in ours.get("engine_config", "").split(",") if word.strip()]
    keys = {word.partition("=")[0].strip().removeprefix("UCX_") for word in settings}
    if "TLS" in keys or "UCX_TLS" in environ:
        return None
    return {**options, "UCX": {**ours, "engine_config": ",".join([*settings, _NETWORK_ONLY])}}


def warm_up_of(
    places: tuple[Place, ...], references: KVCacheReferences, transport: Transport
) -> tuple[WarmUp, Scratch | None]:
    """The lenders to warm, and the page that is read into."""
    if not places:
        return WarmUp(), None
    try:
        page = PagedTransport.on(transport, references.memories()[0].device).page
    except (TransportError, MemoryError) as error:
        log.warning(
            "pdconn: warm_peers: scratch registration failed; "
            "peers are connected, and no page is read: %s",
            error,
        )
        return WarmUp(places), None
    return WarmUp(places, page.memory), page
