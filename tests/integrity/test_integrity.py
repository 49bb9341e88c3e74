"""Checksums of lent bytes: memory, units, the sample, and what a lender is asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pdconn.integrity.checks import Checks, Corrupted, Expected
from pdconn.integrity.lent import LentSums, NotSummed, lent_sums
from pdconn.integrity.memory import AnyMemory, Cells, HostMemory, collected
from pdconn.integrity.sums import (
    SAMPLED_ONE_IN,
    Grain,
    Terms,
    Units,
    counted,
    piece_sums,
    seeds_of,
    total,
)
from pdconn.planning.plan import Need, Pairing, Plan
from pdconn.protocol.errors import MessageError
from pdconn.protocol.proof import NOTHING, ChecksumQuery, PieceRange, PieceSum
from pdconn.protocol.ticket import BlockList
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import LAYOUTS, layout_memory

LAYERS = ("a", "b", "c")
TOKEN_NBYTES = 4
TERMS = Terms("cmpl-1", 100, sampled=False)


@dataclass
class Engine:
    """One rank's cache in this process, full of random bytes, two heads from head 4 on."""

    layout: str = "LBHNC"
    block_tokens: int = 16
    blocks: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        nbytes = self.blocks * len(LAYERS) * 2 * self.block_tokens * TOKEN_NBYTES
        self.bytes: NDArray[np.uint8]
        self.bytes = np.random.default_rng(self.seed).integers(0, 256, nbytes, dtype=np.uint8)
        layers = layout_memory(
            self.layout,
            base=self.bytes.ctypes.data,
            num_blocks=self.blocks,
            layers=LAYERS,
            num_heads=2,
            first_head=4,
            block_tokens=self.block_tokens,
            token_nbytes=TOKEN_NBYTES,
        )
        group = GroupMemory(AttentionKind.FULL, None, self.block_tokens, layers)
        self.references: KVCacheReferences = build_kv_cache_references([group])

    def table(self, tokens: int) -> tuple[BlockList, ...]:
        count = -(-tokens // self.block_tokens)
        ids = np.random.default_rng(self.seed).permutation(np.arange(1, self.blocks))
        return (BlockList(0, tuple(ids[:count].tolist())),)

    def lend(self, terms: Terms = TERMS) -> LentSums:
        table = self.table(terms.num_tokens)
        return lent_sums(HostMemory(), self.references, table, terms)

    def at(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        start = address - self.bytes.ctypes.data
        return self.bytes[start : start + nbytes]


def pull(ours: Engine, theirs: Engine, held: int, until: int, lent: int = 100) -> Plan:
    """Copy what a plan says; the plan."""
    need = Need.for_range(held, until, ours.table(until))
    pairing = Pairing.between(ours.references, [theirs.references])
    plan = pairing.plan(need, theirs.table(lent))
    for _, spans in plan.reads:
        for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
            ours.at(int(local), int(nbytes))[:] = theirs.at(int(remote), int(nbytes))
    return plan


def expectation(
    ours: Engine, theirs: Engine, held: int, until: int, terms: Terms = TERMS
) -> Expected:
    checks = Checks.between(ours.references, [theirs.references])
    (expected,) = checks.expect(Need.for_range(held, until, ours.table(until)), terms)
    return expected


def whole_ask(engine: Engine, units: int, **changes: int) -> ChecksumQuery:
    return ChecksumQuery(
        0, False, (msgspec.structs.replace(PieceRange(0, 0, 3, 4, 2, 0, units), **changes),)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strips_are_the_rows_in_order_whatever_the_layout(layout: str) -> None:
    engine = Engine(layout)
    ids, strips = np.array([3, 9, 3]), np.array([0, 3, 2])
    tensors = engine.references.tensors
    for ref, heads in product(engine.references.groups[0].data, ((4, 2), (5, 1))):
        cells = Cells.for_heads(engine.references, ref, *heads)
        got = list(AnyMemory().gather(cells, 4, ids, strips))
        import torch

        by_torch = collected(torch.from_numpy(engine.bytes), cells, 4, ids, strips)
        for i, (block, strip) in enumerate(zip(ids.tolist(), strips.tolist(), strict=True)):
            for head in range(heads[1]):
                assert ref.token_stride is not None
                start = tensors[ref.tensor].base + block * tensors[ref.tensor].block_stride
                start += ref.offset + (heads[0] - 4 + head) * ref.head_stride
                rows = [start + (4 * strip + row) * ref.token_stride for row in range(4)]
                naive = b"".join(engine.at(row, TOKEN_NBYTES).tobytes() for row in rows)
                assert got[i][head].tobytes() == naive
                assert list(by_torch)[i][head].tobytes() == naive


@pytest.mark.parametrize(("block", "strip"), [(16, 0), (-1, 0), (0, 4), (0, -1)])
def test_no_byte_outside_the_cache_is_read(block: int, strip: int) -> None:
    engine = Engine("BLNHC")
    cells = Cells.for_heads(engine.references, engine.references.groups[0].data[0], 4, 2)
    with pytest.raises(IndexError):
        list(HostMemory().gather(cells, 4, np.array([block]), np.array([strip])))


@pytest.mark.parametrize("heads", [(3, 1), (4, 3), (6, 1), (4, 0)])
def test_heads_that_a_chunk_lacks_are_refused(heads: tuple[int, int]) -> None:
    engine = Engine()
    with pytest.raises(ValueError, match="heads, expected some of 4 to 5"):
        Cells.for_heads(engine.references, engine.references.groups[0].data[0], *heads)


def test_a_piece_is_its_bytes_under_its_name() -> None:
    """The wire depends on this: another formula needs another protocol version."""
    engine = Engine("BHLNC")
    ref = engine.references.groups[0].data[1]
    cells = Cells.for_heads(engine.references, ref, 5, 1)
    units = Units(np.array([7]), np.array([[2]]), np.array([[0]]), 16, 5)
    (rows,) = HostMemory().gather(cells, 16, np.array([2]), np.array([0]))
    seed = int(seeds_of("b", 0, np.array([7]), cells)[0, 0])
    assert seed == 0xA0B133919547817E
    expected = xxh3_64_intdigest(rows[0, : 5 * TOKEN_NBYTES].tobytes(), seed)
    assert piece_sums(HostMemory(), ref, cells, units).tolist() == [[expected]]


def test_every_name_has_a_seed_of_its_own() -> None:
    cells = Cells.for_heads(Engine().references, Engine().references.groups[0].data[0], 4, 2)
    names = product(("a", "b"), (0, 1))
    seeds = [seeds_of(*name, np.arange(1000), replace(cells, num_heads=8)) for name in names]
    assert len(np.unique(seeds)) == 4 * 1000 * 8


@pytest.mark.parametrize("theirs", [16, 32, 48, 64])
@pytest.mark.parametrize("ours", [16, 32, 48, 80])
@pytest.mark.parametrize(("held", "until"), [(0, 100), (0, 99), (48, 100), (16, 96), (30, 97)])
def test_block_sizes_of_vllm_leave_no_written_byte_out(
    ours: int, theirs: int, held: int, until: int
) -> None:
    here, there = Engine("BLNHC", ours, seed=1), Engine("BHLNC", theirs)
    plan = pull(here, there, held, until)
    expected = expectation(here, there, held, until)
    sub = np.gcd(ours, theirs)
    rows = min(100, -(-until // sub) * sub) - held // sub * sub
    assert expected.nbytes == rows * 2 * len(LAYERS) * TOKEN_NBYTES
    unwritten = plan.moved.full - expected.nbytes
    assert unwritten == max(0, -(-until // sub) * sub - 100) * 2 * len(LAYERS) * TOKEN_NBYTES
    expected.compare(there.lend().answer(expected.asks[0]), expected.ours(AnyMemory()))


def test_a_late_step_of_the_lender_is_no_corruption() -> None:
    """vLLM may have scheduled one token more when it lends: it lands behind the last one."""
    here, there = Engine(seed=1), Engine()
    lent, expected = there.lend(), expectation(here, there, 0, 99)
    ref, last = there.references.groups[0].data[0], there.table(100)[0].ids[-1]
    row = there.references.tensors[ref.tensor].base + last * 2 * 16 * TOKEN_NBYTES
    for token, fails in ((100 % 16, False), (99 % 16, True)):
        there.at(row + token * TOKEN_NBYTES, 1)[:] ^= 1
        pull(here, there, 0, 99)
        ours, theirs = expected.ours(HostMemory()), lent.answer(expected.asks[0])
        assert (ours != theirs) == fails
        if fails:
            with pytest.raises(Corrupted, match="sum of what was read from rank 0: theirs 0x"):
                expected.compare(theirs, ours)


def test_answers_that_count_other_pieces_are_distinguished() -> None:
    expected = expectation(Engine(seed=1), Engine(), 0, 100)
    with pytest.raises(Corrupted, match="pieces of what was read from rank 0: theirs 3, ours 4"):
        expected.compare(PieceSum(1, 3), PieceSum(1, 4))


def test_sums_of_shares_add_up_modulo_two_to_the_64() -> None:
    lent = Engine().lend()
    whole = lent.answer(whole_ask(Engine(), 7))
    parts = [lent.answer(whole_ask(Engine(), 3)), lent.answer(whole_ask(Engine(), 4, first_unit=3))]
    assert sum(parts, NOTHING) == whole
    assert total(np.array([2**63, 2**63 + 5], dtype=np.uint64)) == 5


WRONG_ASKS = [
    ({"group": 1}, "share.group: expected below 1, got 1"),
    ({"first_chunk": 1}, "chunks of a share: expected at most 3, got 4"),
    ({"first_head": 5}, "heads of a share: expected 4 to 5, got '5 to 6'"),
    ({"first_head": 3}, "heads of a share: expected 4 to 5, got '3 to 4'"),
    ({"num_units": 8}, "units of a share: expected below 7, got 7"),
    ({"num_units": 2**31 - 1}, "units of a share: expected below 7"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ASKS)
def test_what_was_not_lent_is_refused(change: dict[str, int], message: str) -> None:
    lent = Engine().lend()
    assert lent.answer(whole_ask(Engine(), 7)).pieces == 7 * 3 * 2
    with pytest.raises(MessageError, match=message):
        lent.answer(whole_ask(Engine(), 7, **change))


def test_shares_that_overlap_are_refused() -> None:
    share = PieceRange(0, 0, 2, 4, 2, 0, 1)
    with pytest.raises(MessageError, match="chunks of an ask: expected at most 3, got 4"):
        Engine().lend().answer(ChecksumQuery(0, False, (share, share)))


def test_holes_and_unsummed_blocks_are_refused() -> None:
    engine = Engine()
    ids = engine.table(100)[0].ids
    holed = (BlockList(0, (*ids[:2], 0, *ids[3:])),)
    lent = lent_sums(HostMemory(), engine.references, holed, TERMS)
    with pytest.raises(NotSummed, match="blocks of a share: expected lent ones"):
        lent.answer(whole_ask(engine, 7))
    assert lent.answer(whole_ask(engine, 2)).pieces == 2 * 3 * 2
    with pytest.raises(NotSummed, match="expected those of the sample, got 'all'"):
        engine.lend(replace(TERMS, sampled=True)).answer(whole_ask(engine, 2))


def test_block_lists_of_another_engine_are_refused() -> None:
    with pytest.raises(ValueError, match="block lists: expected 1, got 0"):
        lent_sums(HostMemory(), Engine().references, (), TERMS)


def test_a_sample_is_one_block_in_sixteen_and_the_last_two_tokens() -> None:
    blocks, taken = np.arange(4096), np.zeros(4096, dtype=int)
    for number in range(64):
        terms = Terms(f"cmpl-{number}", 4096 * 16, sampled=True)
        chosen = counted(terms, number % 3, 16, blocks)
        assert chosen[-1]
        taken += chosen
        ends_a_block = replace(terms, num_tokens=16 * 77 + 1)
        assert counted(ends_a_block, 0, 16, np.array([76, 77])).all()
    assert taken[:-1].sum() / (64 * 4095) == pytest.approx(1 / SAMPLED_ONE_IN, rel=0.02)
    assert (taken > 0).mean() > 0.95, "some blocks never have their turn"


def test_samples_of_two_groups_differ() -> None:
    terms, blocks = replace(TERMS, num_tokens=4096 * 16, sampled=True), np.arange(4096)
    assert (counted(terms, 0, 16, blocks) != counted(terms, 1, 16, blocks)).any()
    assert (counted(terms, 0, 16, blocks) == counted(terms, 0, 16, blocks)).all()


def test_opaque_blocks_and_few_long_rows_are_units_of_their_own() -> None:
    ref = Engine(block_tokens=48).references.groups[0].data[0]
    assert Grain.for_chunk(ref, 48, 16) == Grain(16, 3, 1)
    assert Grain.for_chunk(ref, 48 * 4, 16) == Grain(4, 12, 4)
    assert Grain.for_chunk(ref, 48 * 128, 16) == Grain(1, 48, 128)
    opaque = replace(ref, token_stride=None, token_nbytes=None)
    assert Grain.for_chunk(opaque, 48, 16) == Grain(1, 1, 48)


def test_an_ask_is_small_and_survives_the_wire() -> None:
    expected = expectation(Engine(seed=1), Engine(), 0, 100)
    body = msgspec.msgpack.encode(expected.asks[0])
    assert msgspec.msgpack.decode(body, type=ChecksumQuery) == expected.asks[0]
    assert len(body) < 64
    answer = PieceSum(2**64 - 1, 9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=PieceSum) == answer


@pytest.mark.parametrize(
    "body",
    [
        {"rank": -1, "sampled": False, "shares": [[0, 0, 1, 0, 1, 0, 1]]},
        {"rank": 0, "sampled": False, "shares": []},
        {"rank": 0, "sampled": False, "shares": [[0, 0, 1, 0, 1, 0, 1]] * 4097},
        {"rank": 0, "sampled": False, "shares": [[0, 0, 0, 0, 1, 0, 1]]},
        {"rank": 0, "sampled": False, "shares": [[0, -1, 1, 0, 1, 0, 1]]},
        {"rank": 0, "sampled": False, "shares": [[0, 0, 1, 0, 1, 0, 2**31]]},
    ],
)
def test_asks_out_of_bounds_are_refused_when_they_are_read(body: dict[str, object]) -> None:
    with pytest.raises((MessageError, msgspec.ValidationError)):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=ChecksumQuery)


def test_sums_take_a_thousandth_of_the_kv() -> None:
    engine = Engine(blocks=16)
    full = engine.lend(replace(TERMS, num_tokens=15 * 16))
    assert full.nbytes == 15 * 3 * 2 * 8
    sampled = engine.lend(replace(TERMS, num_tokens=15 * 16, sampled=True))
    assert sampled.nbytes < full.nbytes / 2
