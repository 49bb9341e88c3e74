"""The contract that every transport keeps, as tests to inherit.

A test of a backend overrides one method, which yields a ``Rig``: a reader that is
connected to a lender, with an arena of bytes on each side::

    class TestMyTransport(TransportContract):
        @contextmanager
        def open_rig(self) -> Iterator[Rig]:
            arena = Arena.blank()
            ...
            yield Rig(reader, peer, lender_address, arena, lender_memory)

Only the middle of an arena is registered; nothing may be read or written in the guards around it.
Every test compares the whole arena, guards included, so a transport that writes one byte too many
fails.

Tests that a rig does not support (its lender can neither be paused nor killed) are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from transport.address import pack
from transport.errors import (
    BadAddress,
    BadSpans,
    OutOfBounds,
    PeerLost,
    PeerUnknown,
    TransportClosed,
    TransportError,
)
from transport.testing.rig import (
    ARENA_BYTES,
    BLANK,
    GUARD_BYTES,
    Arena,
    Rig,
    pattern,
    scattered,
)
from transport.types import PeerId, ReadId

__all__ = [
    "ARENA_BYTES",
    "BLANK",
    "GUARD_BYTES",
    "Arena",
    "BoundsContract",
    "EndingContract",
    "PeerContract",
    "ReadingContract",
    "Rig",
    "TransportContract",
    "pattern",
    "scattered",
]


class ReadingContract:
    """What a read writes, and that it changes nothing else."""

    def test_bytes_arrive_exactly_and_nothing_else_changes(self, rig: Rig) -> None:
        rig.check_read((64, 4096, 1000))

    def test_whole_registered_memory_can_be_read(self, rig: Rig) -> None:
        rig.check_read((0, 0, ARENA_BYTES))

    def test_scattered_runs_land_where_they_belong(self, rig: Rig) -> None:
        rig.check_read(*scattered(300, seed=1))

    def test_reading_nothing_settles_at_once(self, rig: Rig) -> None:
        settled = rig.reader.poll(rig.reader.read(rig.peer, rig.spans()))
        assert settled is not None
        assert settled.ok
        assert settled.stats.nbytes == 0
        rig.check_arena()

    def test_merging_neighbours_changes_nothing(self, rig: Rig) -> None:
        runs = [(i * 512, 8192 + i * 512, 512) for i in range(100)]
        spans = rig.spans(*runs)
        assert len(spans.coalesced()) == 1
        for attempt in (spans, spans.coalesced()):
            rig.arena.bytes[:] = BLANK
            assert rig.finish(rig.reader.read(rig.peer, attempt)).ok
            rig.check_arena(*runs)

    def test_many_reads_at_once_keep_apart(self, rig: Rig) -> None:
        runs = scattered(64, seed=2)
        reads = [rig.reader.read(rig.peer, rig.spans(run)) for run in runs]
        assert len(set(reads)) == len(reads)
        assert all(rig.finish(read).ok for read in reversed(reads))
        rig.check_arena(*runs)

    def test_stats_count_what_was_asked(self, rig: Rig) -> None:
        runs = scattered(16, seed=3)
        stats = rig.check_read(*runs).stats
        assert stats.nbytes == sum(nbytes for _, _, nbytes in runs)
        assert 1 <= stats.num_descriptors <= len(runs)
        assert 0 <= stats.post_s < rig.settle_s
        assert 0 <= stats.transfer_s < rig.settle_s

    def test_a_settled_read_is_forgotten(self, rig: Rig) -> None:
        read = rig.reader.read(rig.peer, rig.spans((0, 0, 64)))
        rig.finish(read)
        with pytest.raises(KeyError):
            rig.reader.poll(read)

    def test_a_read_that_never_was_is_not_polled(self, rig: Rig) -> None:
        with pytest.raises(KeyError):
            rig.reader.poll(ReadId(10**9))


class BoundsContract:
    """Nothing outside registered memory is read or written."""

    def test_local_runs_stay_inside_registered_memory(self, rig: Rig) -> None:
        outside = [(-64, 0, 64), (ARENA_BYTES, 0, 64), (ARENA_BYTES - 1, 0, 2), (-1, 0, 2)]
        self._refused(rig, outside)

    def test_remote_runs_stay_inside_registered_memory(self, rig: Rig) -> None:
        outside = [(0, -64, 64), (0, ARENA_BYTES, 64), (0, ARENA_BYTES - 1, 2), (0, -1, 2)]
        self._refused(rig, outside)

    def test_overlapping_memory_is_refused_and_nothing_of_it_registered(self, rig: Rig) -> None:
        memory, guard = rig.arena.memory, rig.arena.guard
        last = replace(memory, base=memory.end - 1, nbytes=2)
        for overlapping in (memory, last, replace(memory, base=memory.base + 1, nbytes=1)):
            with pytest.raises(BadSpans):
                rig.reader.register([guard, overlapping])
        self._refused(rig, [(ARENA_BYTES, 0, 64)])
        with pytest.raises(BadSpans):
            rig.reader.register([guard, guard])

    def test_memory_registered_after_connecting_can_be_read_into(self, rig: Rig) -> None:
        rig.reader.register([rig.arena.guard])
        rig.check_read((ARENA_BYTES, 0, GUARD_BYTES))

    def test_neighbouring_runs_may_end_in_neighbouring_memories(self, rig: Rig) -> None:
        rig.reader.register([rig.arena.guard])
        rig.check_read((ARENA_BYTES - 64, 0, 64), (ARENA_BYTES, 64, 64))

    @staticmethod
    def _refused(rig: Rig, outside: Sequence[tuple[int, int, int]]) -> None:
        for run in outside:
            read = rig.reader.read(rig.peer, rig.spans((0, 0, 32), run))
            settled = rig.finish(read)
            assert isinstance(settled.error, OutOfBounds), f"{run}: {settled}"
            rig.check_arena()


class PeerContract:
    """Connecting, disconnecting, and invalid addresses."""

    def test_an_unknown_peer_is_refused(self, rig: Rig) -> None:
        with pytest.raises(PeerUnknown):
            rig.reader.read(PeerId("unknown"), rig.spans((0, 0, 64)))

    def test_connecting_twice_is_harmless(self, rig: Rig) -> None:
        assert rig.reader.connect(rig.address) == rig.peer
        rig.check_read((0, 0, 64))

    def test_a_disconnected_peer_is_unknown_until_it_is_connected_again(self, rig: Rig) -> None:
        rig.check_read((0, 0, 64))
        rig.reader.disconnect(rig.peer)
        rig.reader.disconnect(rig.peer)
        with pytest.raises(PeerUnknown):
            rig.reader.read(rig.peer, rig.spans((0, 0, 64)))
        assert rig.reader.connect(rig.address) == rig.peer
        rig.check_read((0, 0, 64))

    def test_disconnecting_an_unknown_peer_is_ignored(self, rig: Rig) -> None:
        rig.reader.disconnect(PeerId("unknown"))
        rig.check_read((0, 0, 64))

    def test_damaged_addresses_are_refused_and_harm_no_connection(self, rig: Rig) -> None:
        address = rig.address
        damaged = [b"", b"garbage", b"\x00" * 64, address + b"x", pack("other", "p", b"payload")]
        damaged += [address[:length] for length in range(0, len(address), 41)]
        damaged += [
            address[:i] + bytes([address[i] ^ 0x10]) + address[i + 1 :]
            for i in range(0, len(address), 29)
        ]
        for wrong in damaged:
            with pytest.raises(BadAddress):
                rig.reader.connect(wrong)
        rig.check_read((0, 0, 64))


class EndingContract:
    """Closing, and peers that stall or die."""

    quiet_s = 0.3
    """How long a test observes that nothing happens."""

    def test_closing_twice_is_harmless(self, rig: Rig) -> None:
        rig.check_read((0, 0, 64))
        rig.reader.close()
        rig.reader.close()

    def test_a_closed_transport_refuses_work(self, rig: Rig) -> None:
        rig.check_read((0, 0, 64))
        read = rig.reader.read(rig.peer, rig.spans())
        rig.reader.close()
        calls: list[Callable[[], object]] = [
            lambda: rig.reader.read(rig.peer, rig.spans((0, 0, 64))),
            lambda: rig.reader.register([rig.arena.guard]),
            lambda: rig.reader.connect(rig.address),
            rig.reader.address,
        ]
        for call in calls:
            with pytest.raises(TransportClosed):
                call()
        with pytest.raises(KeyError):
            rig.reader.poll(read)
        rig.reader.disconnect(rig.peer)

    def test_a_stalled_read_is_pending_until_it_lands(self, rig: Rig) -> None:
        pause, resume = _stalling(rig)
        rig.check_read((0, 0, 64))
        pause()
        read = rig.reader.read(rig.peer, rig.spans((4096, 0, 4096)))
        self._stays_pending(rig, read)
        rig.check_arena((0, 0, 64))
        resume()
        assert rig.finish(read).ok
        rig.check_arena((0, 0, 64), (4096, 0, 4096))

    def test_disconnecting_settles_no_read_that_can_still_write(self, rig: Rig) -> None:
        pause, resume = _stalling(rig)
        pause()
        read = rig.reader.read(rig.peer, rig.spans((0, 0, 4096)))
        rig.reader.disconnect(rig.peer)
        with pytest.raises(PeerUnknown):
            rig.reader.read(rig.peer, rig.spans((0, 0, 64)))
        settled = rig.reader.poll(read)
        if settled is None:
            resume()
            settled = rig.finish(read)
        assert isinstance(settled.error, PeerLost), settled
        self._nothing_is_written_later(rig, resume)
        assert rig.reader.connect(rig.address) == rig.peer
        rig.check_read((0, 0, 64))

    def test_once_closed_nothing_is_written(self, rig: Rig) -> None:
        pause, resume = _stalling(rig)
        pause()
        read = rig.reader.read(rig.peer, rig.spans((0, 0, 4096)))
        try:
            rig.reader.close()
        except TransportError:  # it cannot guarantee that yet
            with pytest.raises(TransportClosed):
                rig.reader.read(rig.peer, rig.spans((0, 0, 64)))
            resume()
            rig.finish(read)
            rig.reader.close()
        self._nothing_is_written_later(rig, resume)

    def test_reads_from_a_killed_peer_settle_as_lost(self, rig: Rig) -> None:
        kill = _killing(rig)
        rig.check_read((0, 0, 64))
        kill()
        for _ in range(3):
            settled = rig.finish(rig.reader.read(rig.peer, rig.spans((64, 64, 64))))
            assert isinstance(settled.error, PeerLost), settled
        rig.check_arena((0, 0, 64))
        rig.reader.disconnect(rig.peer)

    def test_stalled_reads_settle_as_lost_when_their_peer_dies(self, rig: Rig) -> None:
        (pause, _), kill = _stalling(rig), _killing(rig)
        rig.check_read((0, 0, 64))
        pause()
        reads = [rig.reader.read(rig.peer, rig.spans((64 * i, 0, 64))) for i in (1, 2, 3)]
        self._stays_pending(rig, reads[0])
        kill()
        for read in reads:
            settled = rig.finish(read)
            assert isinstance(settled.error, PeerLost), settled
        rig.check_arena((0, 0, 64))

    def _nothing_is_written_later(self, rig: Rig, resume: Callable[[], None]) -> None:
        rig.arena.bytes[:] = BLANK
        resume()
        time.sleep(self.quiet_s)
        rig.check_arena()

    def _stays_pending(self, rig: Rig, read: ReadId) -> None:
        until = time.monotonic() + self.quiet_s
        while time.monotonic() < until:
            assert rig.reader.poll(read) is None, "settled while its peer was stalled"
            time.sleep(0.005)


def _stalling(rig: Rig) -> tuple[Callable[[], None], Callable[[], None]]:
    if rig.pause is None or rig.resume is None:
        pytest.skip("the lender of this rig cannot be paused")
    return rig.pause, rig.resume


def _killing(rig: Rig) -> Callable[[], None]:
    if rig.kill is None:
        pytest.skip("the lender of this rig cannot be killed")
    return rig.kill


class TransportContract(ReadingContract, BoundsContract, PeerContract, EndingContract):
    """The whole contract: inherit it and override ``open_rig``."""

    def open_rig(self) -> AbstractContextManager[Rig]:
        """A new rig; leaving the context closes its transports."""
        raise NotImplementedError(f"{type(self).__name__} must override open_rig")

    @pytest.fixture
    def rig(self) -> Iterator[Rig]:
        """One rig per test."""
        with self.open_rig() as rig:
            yield rig
