"""A pull of random blocks keeps up with one READ: two processes, real NIXL, ratios of one run.

The cache is cross-layer, so a block of all layers is one piece, and so small that layer by layer
its pieces are 8 KiB.  Neither the machine's speed nor its other load matters: every round measures
all methods in turn, and the median of the rounds' ratios counts.  A slow run is repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pdconn.tools.bench.transfer.bench_case import OpenCase
from pdconn.tools.bench.transfer.bench_lender import LocalLender
from pdconn.tools.bench.transfer.methods import Method
from pdconn.tools.bench.transfer.paths import PATHS
from pdconn.tools.bench.transfer.rounds import MethodResult, take_rounds
from pdconn.tools.bench.transfer.workload import Workload
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.shapes import built_in

MODEL = built_in("llama-3.1-8b")
TRIES = 3
OF_RAW = 0.5


@pytest.fixture(scope="module")
def lender() -> Iterator[LocalLender]:
    lender = LocalLender()
    yield lender
    lender.close()


def measured(
    lender: LocalLender, path: str, prefill: EngineShape, decode: EngineShape, tokens: int
) -> dict[Method, MethodResult]:
    with OpenCase(Workload(prefill, decode, tokens), PATHS[path], lender.control) as rig:
        return {one.method: one for one in take_rounds(rig, 5, random.Random(1), lambda _: None)}


def is_slow(methods: dict[Method, MethodResult]) -> list[str]:
    """What a pull does not keep up with."""
    ours, layered = methods[Method.PDCONN].of_raw, methods[Method.LAYERED].of_raw
    assert ours is not None
    assert layered is not None
    found = []
    if ours < OF_RAW:
        found.append(f"{ours:.2f} of one READ's throughput")
    if ours <= layered:
        found.append(f"{ours:.2f} of it, layer by layer {layered:.2f}")
    return found


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_random_blocks_keep_up_with_one_read_and_beat_layer_by_layer(
    lender: LocalLender, path: str
) -> None:
    small = EngineShape(MODEL, layout="BLHNC", block_tokens=2)
    seen = []
    for _ in range(TRIES):
        methods = measured(lender, path, small, small, 256)
        assert methods[Method.PDCONN].runs <= 256 // 2 < methods[Method.LAYERED].runs
        seen.append(is_slow(methods))
        if not seen[-1]:
            return
    pytest.fail(f"in each of {TRIES} runs: {seen}")


@pytest.mark.parametrize("path", ["shm", "tcp"])
def test_a_plan_in_pieces_of_a_token_and_head_is_noticed(lender: LocalLender, path: str) -> None:
    """Negative control: memory orders that share no larger piece."""
    methods = measured(lender, path, EngineShape(MODEL, "BLNHC"), EngineShape(MODEL, "BHLNC"), 128)
    assert methods[Method.PDCONN].runs > 10_000
    assert len(is_slow(methods)) == 2
