"""Pulls between two processes arrive byte by byte, in host memory and in a GPU's.

Cross-layer blocks keep layers outside of heads (BLHNC), head-major ones heads outside of
layers (BHLNC, ``RowOrder.HEAD_MAJOR``); ranks of unequal sizes take slices of heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest

from pdconn.planning.plan import Pairing
from pdconn.protocol.messages import RankGeometry
from pdconn.puller.commands import ClaimTicket, ReadBlocks
from pdconn.puller.peers import Rank
from pdconn.puller.thread import Puller, PullResults
from pdconn.puller.verification import Verify
from pdconn.puller.warmup import Place, WarmUp
from registration.scratch import Scratch
from tests.fakes.layouts import LAYOUTS
from tests.gpu.bytes_on import BytesOn
from tests.gpu.cases import BLOCK_TOKENS, Case, Request, allocated
from tests.gpu.rigs import LOCALHOST, PATIENCE_S, TRAITS, DeviceLender, settled_reads, ticket_of
from tests.property.oracle import UNTOUCHED, expected
from tests.threads.inside import num_warm
from transport import Device
from transport.nixl.transport import NixlTransport

CASES = [
    Case(layout, layout, theirs, ours, held)
    for layout in ("BLHNC", "BHLNC")
    for theirs, ours in ((1, 1), (2, 1), (1, 2))
    for held in (0, 3 * BLOCK_TOKENS)
]
UNEQUAL = [case for case in CASES if case.their_tp != case.our_tp and not case.held]
NEXT = dict(zip(LAYOUTS, (*LAYOUTS[1:], LAYOUTS[0]), strict=True))
EVERY = [Case(at, at, *tp) for at in LAYOUTS for tp in ((1, 1), (4, 1), (2, 4))] + [
    Case(theirs, ours, 4, 2) for theirs, ours in NEXT.items()
]
"""Every layout, whole heads and slices of the model's four; and one read into another."""
MIXED = [Case("BLHNC", "BHLNC", 2, 1), Case("BHLNC", "LBHNC", 1, 2), Case("LBHNC", "BLHNC", 2, 2)]


def pulled(
    case: Case, ranks: list[RankGeometry], device: Device
) -> Iterator[tuple[Request, int, BytesOn, int]]:
    """Each rank of ours, after it read what its plan says; and how many runs that had."""
    request = Request.of(case)
    for rank in range(len(request.ours.ranks)):
        ours = BytesOn(request.blank(rank), device)
        with NixlTransport("gpu-decode", huge_pages=False) as transport:
            transport.register([ours.memory])
            theirs = [one.references for one in ranks]
            pairing = Pairing.between(allocated(request.ours, rank, ours), theirs, rank)
            plan = pairing.plan(request.need, request.theirs.tables)
            reads = [
                transport.read(transport.connect(ranks[number].address), spans)
                for number, spans in plan.reads
            ]
            for settled in settled_reads(transport, reads):
                assert settled.ok, settled.error
            yield request, rank, ours, plan.num_runs


@pytest.mark.parametrize("case", [*CASES, *MIXED, *EVERY], ids=str)
def test_every_byte_that_is_needed_arrives_and_no_other_changes(
    case: Case, lender: DeviceLender, device: Device
) -> None:
    ranks, _ = lender.lend(case)
    for request, rank, ours, _ in pulled(case, ranks, device):
        wrong = np.flatnonzero(ours != request.expected(rank))
        assert not len(wrong), f"rank {rank}: {len(wrong)} bytes are wrong, first {wrong[0]}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_read_as_another_is_noticed(layout: str) -> None:
    """Negative control."""
    ours = Request.of(Case(layout, layout, 1, 1)).expected(0)
    other = Request.of(Case(layout, NEXT[layout], 1, 1)).expected(0)
    assert (ours != other).any()


@pytest.mark.parametrize("layout", ["BLHNC", "BHLNC"])
def test_a_byte_that_was_corrupted_at_the_lender_is_noticed(
    layout: str, lender: DeviceLender, device: Device
) -> None:
    """Negative control: exactly that byte, where the plan put it."""
    case = Case(layout, layout, 2, 1)
    ranks, _ = lender.lend(case)
    request = Request.of(case)
    lender.flip(1, lent_offset(request, 1))
    for _, rank, ours, _ in pulled(case, ranks, device):
        assert (ours != request.expected(rank)).sum() == 1


def test_head_major_blocks_keep_a_slice_of_heads_in_one_run(
    lender: DeviceLender, device: Device
) -> None:
    runs = {}
    for layout in ("BLHNC", "BHLNC"):
        case = Case(layout, layout, 1, 2)
        ranks, _ = lender.lend(case)
        runs[layout] = [num_runs for *_, num_runs in pulled(case, ranks, device)]
    assert all(few < many for few, many in zip(runs["BHLNC"], runs["BLHNC"], strict=True))


# Through the whole runtime: lender, puller, checksums, warm-up


@contextmanager
def pullers(
    case: Case, device: Device, port: int, verify: Verify
) -> Iterator[list[tuple[Puller, BytesOn]]]:
    """A puller for each rank of ours, warmed, and its memory."""
    request = Request.of(case)
    with ExitStack() as stack:
        made = []
        for rank in range(len(request.ours.ranks)):
            ours, scratch = BytesOn(request.blank(rank), device), Scratch.on(device)
            transport = NixlTransport("gpu-decode", huge_pages=False)
            transport.register([ours.memory, scratch.memory])
            references = allocated(request.ours, rank, ours)
            me = Rank("decode", rank, case.our_tp, rank, references, TRAITS)
            warm_up = WarmUp((Place(LOCALHOST, port),), scratch.memory)
            puller = Puller(me, transport, verify=verify, warm_up=warm_up)
            stack.enter_context(closing(puller))
            made.append((puller, ours, scratch))
        yield [(puller, ours) for puller, ours, _ in made]


def until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < give_up, f"not done after {PATIENCE_S:g} s"
        time.sleep(0.005)


def pull(case: Case, port: int, made: list[tuple[Puller, BytesOn]]) -> list[PullResults]:
    """Pull the case's request with every rank; how it ended for each."""
    request = Request.of(case)
    ended: dict[int, PullResults] = {}
    for puller, _ in made:
        puller.post_command(ClaimTicket("d", "here/1", ticket_of(request, port)))
        puller.post_command(ReadBlocks("d", request.need))

    def collect() -> bool:
        for number, (puller, _) in enumerate(made):
            outcome = puller.take_results()
            if outcome.records or outcome.failed:
                ended[number] = outcome
        return len(ended) == len(made)

    until(collect)
    return [ended[number] for number in range(len(made))]


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.held and c.their_tp != c.our_tp], ids=str
)
def test_a_pull_through_the_whole_runtime_arrives_and_is_verified(
    case: Case, verify: Verify, lender: DeviceLender, device: Device
) -> None:
    _, port = lender.lend(case, verify=verify is not Verify.OFF)
    request = Request.of(case)
    with pullers(case, device, port, verify) as made:
        until(lambda: all(num_warm(puller) for puller, _ in made))
        outcomes = pull(case, port, made)
        assert [outcome.failed for outcome in outcomes] == [()] * case.our_tp
        for rank, (puller, ours) in enumerate(made):
            assert not (ours != request.expected(rank)).any()
            verified = puller.take_pull_counts().get("pulls_verified", 0)
            assert verified == (verify is not Verify.OFF)


@pytest.mark.parametrize("layout", ["BLHNC", "BHLNC"])
def test_a_byte_that_changed_after_it_was_summed_fails_the_pull(
    layout: str, lender: DeviceLender, device: Device
) -> None:
    case = Case(layout, layout, 2, 1)
    _, port = lender.lend(case, verify=True)
    lender.flip(0, lent_offset(Request.of(case), 0))
    with pullers(case, device, port, Verify.ALWAYS) as made:
        [outcome] = pull(case, port, made)
        [failed] = outcome.failed
        assert "sum" in failed.reason
        assert made[0][0].take_pull_counts() == {"pulls_corrupted": 1}


def lent_offset(request: Request, rank: int) -> int:
    """Where a byte lies in a lender's rank that our rank 0 needs."""
    [theirs] = request.theirs.labels(rank).values()
    [ours] = expected(request.ours, request.theirs, 0, request.need).values()
    found = np.flatnonzero(np.isin(theirs, ours[ours != UNTOUCHED]))
    return int(found[len(found) // 2])
