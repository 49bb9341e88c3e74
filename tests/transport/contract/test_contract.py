"""The contract can fail: each broken transport is caught by the test that is meant for it."""

from __future__ import annotations

import pytest

from tests.transport.contract import mutants
from tests.transport.contract.rigs import memory_rig
from transport.errors import TransportError
from transport.testing.contract import TransportContract
from transport.testing.inprocess.transport import InProcessTransport

CAUGHT_BY = {
    mutants.WritesOneByteTooMany: "test_bytes_arrive_exactly_and_nothing_else_changes",
    mutants.WritesOneByteTooFew: "test_bytes_arrive_exactly_and_nothing_else_changes",
    mutants.DropsTheLastRun: "test_scattered_runs_land_where_they_belong",
    mutants.MergesByLocalAddressOnly: "test_scattered_runs_land_where_they_belong",
    mutants.SettlesEarly: "test_a_stalled_read_is_pending_until_it_lands",
    mutants.SwallowsErrors: "test_local_runs_stay_inside_registered_memory",
    mutants.ChecksNoLocalBounds: "test_local_runs_stay_inside_registered_memory",
    mutants.ChecksNoRemoteBounds: "test_remote_runs_stay_inside_registered_memory",
    mutants.WritesBeforeItChecks: "test_remote_runs_stay_inside_registered_memory",
    mutants.NeverSettlesNothing: "test_reading_nothing_settles_at_once",
    mutants.NeverForgets: "test_a_settled_read_is_forgotten",
    mutants.PollsWhatNeverWas: "test_a_read_that_never_was_is_not_polled",
    mutants.ReusesReadIds: "test_many_reads_at_once_keep_apart",
    mutants.CountsNothing: "test_stats_count_what_was_asked",
    mutants.RegistersOverlaps: "test_overlapping_memory_is_refused_and_nothing_of_it_registered",
    mutants.RegistersHalf: "test_overlapping_memory_is_refused_and_nothing_of_it_registered",
    mutants.RegistersOnce: "test_memory_registered_after_connecting_can_be_read_into",
    mutants.MergesAcrossMemories: "test_neighbouring_runs_may_end_in_neighbouring_memories",
    mutants.KnowsEveryPeer: "test_an_unknown_peer_is_refused",
    mutants.DisconnectsOnce: "test_disconnecting_an_unknown_peer_is_ignored",
    mutants.KeepsDisconnectedPeers: (
        "test_a_disconnected_peer_is_unknown_until_it_is_connected_again"
    ),
    mutants.TakesAnyAddress: "test_damaged_addresses_are_refused_and_harm_no_connection",
    mutants.BadAddressesCostConnections: (
        "test_damaged_addresses_are_refused_and_harm_no_connection"
    ),
    mutants.RefusesToConnectTwice: "test_connecting_twice_is_harmless",
    mutants.ClosesOnce: "test_closing_twice_is_harmless",
    mutants.WorksWhenClosed: "test_a_closed_transport_refuses_work",
    mutants.RemembersReadsWhenClosed: "test_a_closed_transport_refuses_work",
    mutants.SettlesWhatItDisconnects: "test_disconnecting_settles_no_read_that_can_still_write",
    mutants.ClosesUnderItsReads: "test_once_closed_nothing_is_written",
    mutants.LosesNoPeer: "test_reads_from_a_killed_peer_settle_as_lost",
    mutants.BlamesTheCaller: "test_stalled_reads_settle_as_lost_when_their_peer_dies",
}

CAUGHT = (AssertionError, pytest.fail.Exception, TransportError, KeyError)


class HurriedContract(TransportContract):
    quiet_s = 0.02


def _run(test: str, transport: type[InProcessTransport]) -> None:
    with memory_rig(transport, settle_s=0.1) as rig:
        getattr(HurriedContract(), test)(rig)


@pytest.mark.parametrize("mutant", CAUGHT_BY, ids=lambda mutant: mutant.__name__)
def test_the_contract_catches(mutant: type[InProcessTransport]) -> None:
    test = CAUGHT_BY[mutant]
    _run(test, InProcessTransport)
    with pytest.raises(CAUGHT):
        _run(test, mutant)


def test_every_test_of_the_contract_catches_something() -> None:
    tests = {name for name in dir(TransportContract) if name.startswith("test_")}
    uncaught = {
        # Variations on a theme whose mutants others catch.
        "test_whole_registered_memory_can_be_read",
        "test_merging_neighbours_changes_nothing",
    }
    assert tests - uncaught == set(CAUGHT_BY.values())
