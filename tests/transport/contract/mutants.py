"""Transports that are each wrong in one way, to see that the contract notices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from transport.errors import BadAddress, BadSpans, OutOfBounds, PeerLost
from transport.regions import Regions
from transport.testing.inprocess.transport import InProcessTransport
from transport.types import Memory, PeerId, ReadId, ReadStats, Settled, Spans

_FINE = Settled(ReadStats(64, 1, 0.0, 0.0))


def _stretched(spans: Spans, by: int) -> Spans:
    nbytes = spans.nbytes.copy()
    if len(nbytes):
        nbytes[-1] = np.uint64(int(nbytes[-1]) + by)
    return replace(spans, nbytes=nbytes)


class WritesOneByteTooMany(InProcessTransport):
    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        return super().read(peer, _stretched(spans, 1))


class WritesOneByteTooFew(InProcessTransport):
    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        return super().read(peer, _stretched(spans, -1))


class DropsTheLastRun(InProcessTransport):
    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        last = len(spans) - 1 if len(spans) > 1 else len(spans)
        return super().read(
            peer, Spans(spans.local[:last], spans.remote[:last], spans.nbytes[:last])
        )


class MergesByLocalAddressOnly(InProcessTransport):
    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        order = np.argsort(spans.local)
        return super().read(peer, Spans(spans.local[order], spans.remote, spans.nbytes[order]))


class SettlesEarly(InProcessTransport):
    def poll(self, read: ReadId) -> Settled | None:
        return super().poll(read) or _FINE


class SwallowsErrors(InProcessTransport):
    def poll(self, read: ReadId) -> Settled | None:
        settled = super().poll(read)
        return settled and replace(settled, error=None)


class ChecksNoLocalBounds(InProcessTransport):
    def _outside(self, theirs: Regions, spans: Spans) -> OutOfBounds | None:
        return theirs.outside("remote", spans.remote, spans.nbytes, spans.remote_device)


class ChecksNoRemoteBounds(InProcessTransport):
    def _outside(self, theirs: Regions, spans: Spans) -> OutOfBounds | None:
        return self._registered.outside("local", spans.local, spans.nbytes, spans.local_device)


class WritesBeforeItChecks(InProcessTransport):
    def _outside(self, theirs: Regions, spans: Spans) -> OutOfBounds | None:
        error = super()._outside(theirs, spans)
        if error is not None:
            ctypes.memmove(int(spans.local[0]), int(spans.remote[0]), int(spans.nbytes[0]))
        return error


class NeverSettlesNothing(InProcessTransport):
    def poll(self, read: ReadId) -> Settled | None:
        settled = super().poll(read)
        return settled if settled and settled.stats.nbytes else None


class NeverForgets(InProcessTransport):
    def poll(self, read: ReadId) -> Settled | None:
        settled = super().poll(read)
        if settled:
            self._reads[read] = settled
        return settled


class PollsWhatNeverWas(InProcessTransport):
    def poll(self, read: ReadId) -> Settled | None:
        return super().poll(read) if read in self._reads else None


class ReusesReadIds(InProcessTransport):
    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        super().read(peer, spans)
        return ReadId(0)


class CountsNothing(InProcessTransport):
    def poll(self, read: ReadId) -> Settled | None:
        settled = super().poll(read)
        return settled and replace(settled, stats=ReadStats(0, 1, 0.0, 0.0))


class RegistersOverlaps(InProcessTransport):
    def register(self, memories: Sequence[Memory]) -> None:
        for memory in memories:
            if memory not in self._registered:
                self._registered.add_memories([memory])


class RegistersHalf(InProcessTransport):
    def register(self, memories: Sequence[Memory]) -> None:
        for memory in memories:
            super().register([memory])


class RegistersOnce(InProcessTransport):
    def register(self, memories: Sequence[Memory]) -> None:
        if not len(self._registered):
            super().register(memories)


class MergesAcrossMemories(InProcessTransport):
    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        return super().read(peer, spans.coalesced())


class KnowsEveryPeer(InProcessTransport):
    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        return super().read(peer if peer in self._peers else next(iter(self._peers)), spans)


class DisconnectsOnce(InProcessTransport):
    def disconnect(self, peer: PeerId) -> None:
        del self._peers[peer]


class KeepsDisconnectedPeers(InProcessTransport):
    def disconnect(self, peer: PeerId) -> None:
        self.network.end_reads(self.peer_id, peer)


class TakesAnyAddress(InProcessTransport):
    def connect(self, address: bytes) -> PeerId:
        try:
            return super().connect(address)
        except BadAddress:
            return PeerId("anything")


class BadAddressesCostConnections(InProcessTransport):
    """As NIXL itself does, without a checksum before it."""

    def connect(self, address: bytes) -> PeerId:
        try:
            return super().connect(address)
        except BadAddress:
            self._peers.update(dict.fromkeys(self._peers, Regions()))
            raise


class RefusesToConnectTwice(InProcessTransport):
    def connect(self, address: bytes) -> PeerId:
        if self._peers:
            raise BadSpans("connected already")
        return super().connect(address)


class ClosesOnce(InProcessTransport):
    def close(self) -> None:
        self._check_open()
        super().close()


class WorksWhenClosed(InProcessTransport):
    def _check_open(self) -> None:
        pass


class RemembersReadsWhenClosed(InProcessTransport):
    def close(self) -> None:
        reads = dict(self._reads)
        super().close()
        self._reads.update(reads)


class SettlesWhatItDisconnects(InProcessTransport):
    """As if releasing a NIXL handle cancelled its READ."""

    def disconnect(self, peer: PeerId) -> None:
        super().disconnect(peer)
        for read, settled in self._reads.items():
            if settled is None:
                self._reads[read] = replace(_FINE, error=PeerLost("disconnected"))

    def _settle(self, read: ReadId, settled: Settled) -> None:
        if self._reads.get(read) is None:
            super()._settle(read, settled)


class ClosesUnderItsReads(InProcessTransport):
    def close(self) -> None:
        self._reads.clear()
        super().close()
        self._reads.clear()

    def _settle(self, read: ReadId, settled: Settled) -> None:
        if read in self._reads:
            super()._settle(read, settled)


class LosesNoPeer(InProcessTransport):
    """A killed peer's reads stay pending for ever."""

    def poll(self, read: ReadId) -> Settled | None:
        settled = super().poll(read)
        if settled and isinstance(settled.error, PeerLost):
            self._reads[read] = None
            return None
        return settled


class BlamesTheCaller(InProcessTransport):
    def poll(self, read: ReadId) -> Settled | None:
        settled = super().poll(read)
        if settled and isinstance(settled.error, PeerLost):
            return replace(settled, error=OutOfBounds("you"))
        return settled
