"""Spans: what they refuse, and that a few numbers are checked as arrays are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import HOST, BadSpans, Device, Spans

LAST = 2**63 - 1


def arrays(local: Sequence[int], remote: Sequence[int], nbytes: Sequence[int]) -> Spans:
    """The same runs by way of arrays."""
    return Spans(*(np.array(column, dtype=np.uint64) for column in (local, remote, nbytes)))


def few(local: Sequence[int], remote: Sequence[int], nbytes: Sequence[int]) -> Spans:
    """The same runs without."""
    return Spans.merged_few(local, remote, nbytes, HOST, Device("cuda", 1))


def test_a_few_runs_are_the_columns_that_arrays_would_be() -> None:
    spans = few([4096, 0], [64, 8192], [64, 128])
    for column, expected in zip(
        (spans.local, spans.remote, spans.nbytes), ([4096, 0], [64, 8192], [64, 128]), strict=True
    ):
        assert column.dtype == np.uint64
        assert column.tolist() == expected
    assert (spans.local_device, spans.remote_device) == (HOST, Device("cuda", 1))
    assert (len(spans), spans.total_bytes) == (2, 192)
    assert spans.coalesced() is spans


def test_no_runs_are_no_error() -> None:
    assert len(few([], [], [])) == len(arrays([], [], [])) == 0


@pytest.mark.parametrize(
    ("local", "remote", "nbytes", "why"),
    [
        ([0, 8], [0, 8], [8], "local 2, remote 2, nbytes 1"),
        ([0, 8], [0, 8], [8, 0], "run 1 has 0 bytes"),
        ([LAST], [0], [1], "local: an address lies beyond 63 bits"),
        ([0, 0], [8, LAST - 7], [8, 8], "remote: an address lies beyond 63 bits"),
        ([1 << 63], [0], [8], "local: an address lies beyond 63 bits"),
    ],
)
def test_both_ways_refuse_the_same(
    local: list[int], remote: list[int], nbytes: list[int], why: str
) -> None:
    for made in (arrays, few):
        with pytest.raises(BadSpans, match=why):
            made(local, remote, nbytes)


def test_negative_numbers_are_refused_where_an_array_could_not_hold_them() -> None:
    with pytest.raises(BadSpans, match="remote: an address lies beyond 63 bits"):
        few([0], [-8], [8])
    with pytest.raises(BadSpans, match="run 0 has -8 bytes"):
        few([0], [0], [-8])


RUNS = st.lists(
    st.tuples(
        *(st.one_of(st.integers(0, 1 << 20), st.integers(LAST - 64, LAST + 64)) for _ in range(2)),
        st.integers(0, 64),
    ),
    max_size=6,
)


@given(RUNS)
def test_what_one_way_takes_the_other_takes(runs: list[tuple[int, int, int]]) -> None:
    columns = [[run[at] for run in runs] for at in range(3)]
    taken = []
    for made in (arrays, few):
        try:
            spans = made(*columns)
        except BadSpans:
            taken.append(None)
        else:
            taken.append((*(c.tolist() for c in (spans.local, spans.remote, spans.nbytes)),
                          spans.total_bytes))  # fmt: skip
    assert taken[0] == taken[1]
