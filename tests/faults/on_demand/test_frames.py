"""Laws of frames and their faults that need no sockets: what goes out, and when."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from pdconn.faults.frame_faults import (
    HOLD_S,
    DelayedFrame,
    FlowState,
    FrameCutter,
    FrameFaults,
    MessageFaults,
)
from pdconn.protocol.messages import frame
from tests.faults.on_demand.relay_ends import framed


def fed(faults: MessageFaults, frames: list[bytes], times: list[float]) -> list[DelayedFrame]:
    """What goes out when ``frames`` arrive at ``times``, and the stream ends with them."""
    direction = FrameFaults(faults, Random(7))
    out: list[DelayedFrame] = []
    for one, now in zip(frames, times, strict=True):
        out += direction.pass_frame(one, now)
    return out + direction.release_held(times[-1] if times else 0.0)


chances = st.floats(0.0, 1.0)
mixes = st.builds(
    MessageFaults, delay=chances, delay_s=st.floats(0.0, 5.0), duplicate=chances, reorder=chances
)


@given(mixes, st.lists(st.floats(0.0, 1.0), max_size=30))
def test_without_loss_every_frame_goes_out_and_due_times_never_go_back(
    faults: MessageFaults, gaps: list[float]
) -> None:
    times = [sum(gaps[:number]) for number in range(len(gaps))]
    frames = [b"%d" % number for number in range(len(gaps))]
    out = fed(faults, frames, times)
    assert {one.frame for one in out} == set(frames)
    assert max(Counter(one.frame for one in out).values(), default=0) <= 2
    assert [one.due for one in out] == sorted(one.due for one in out)
    for one in out:
        assert one.due >= times[int(one.frame)]


@given(mixes, st.integers(0, 30))
def test_a_frame_is_overtaken_by_one_frame_at_most(faults: MessageFaults, num: int) -> None:
    frames = [b"%d" % number for number in range(num)]
    order = [int(one.frame) for one in fed(faults, frames, [0.0] * num)]
    for place, number in enumerate(order):
        assert all(later > number - 2 for later in order[place:])


def test_a_cut_takes_what_is_held_and_a_stall_lets_it_go() -> None:
    for faults, state, expected in (
        (MessageFaults(cut=0.5, reorder=1.0), FlowState.CUT, []),
        (MessageFaults(stall=0.5, reorder=1.0), FlowState.STALLED, [b"held"]),
    ):
        rng = Scripted([0.9] * 7 + [0.0] + [0.1] * 7 + [0.0] + [0.9] * 8)
        direction = FrameFaults(faults, rng)
        assert direction.pass_frame(b"held", 1.0) == []
        assert direction.held_until == 1.0 + HOLD_S
        assert [one.frame for one in direction.pass_frame(b"end", 1.1)] == expected
        assert (direction.state, direction.held_until) == (state, None)
        assert direction.pass_frame(b"more", 1.2) == []


def test_a_late_frame_that_is_overtaken_is_no_earlier_for_it() -> None:
    rng = Scripted([0.9] * 5 + [0.0, 0.0, 0.1] + [0.9] * 8)
    direction = FrameFaults(MessageFaults(delay=0.5, delay_s=5.0, reorder=0.5), rng)
    assert direction.pass_frame(b"late", 1.0) == []
    assert direction.pass_frame(b"next", 1.1) == [
        DelayedFrame(1.1, b"next"),
        DelayedFrame(6.0, b"late"),
    ]


class Scripted(Random):
    """Draws the values it is given."""

    def __init__(self, draws: list[float]) -> None:
        super().__init__(7)
        self._draws = draws

    def random(self) -> float:
        return self._draws.pop(0)


@given(st.lists(st.binary(max_size=50), max_size=20), st.data())
def test_units_lose_and_add_nothing_however_the_stream_is_cut(
    some: list[bytes], data: st.DataObject
) -> None:
    stream = framed(some) + data.draw(st.sampled_from([b"", b"\0", b"\0\0\0\x09abc"]))
    units, seen, at = FrameCutter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 60))
        seen += units.cut_frames(stream[at : at + size])
        at += size
    assert seen == [frame(body) for body in some]
    assert b"".join(seen + units.take_remainder()) == stream


@given(st.binary(max_size=300), st.integers(1, 60))
def test_units_pass_any_bytes_on(stream: bytes, size: int) -> None:
    units, seen = FrameCutter(max_frame=40), []
    for at in range(0, len(stream), size):
        seen += units.cut_frames(stream[at : at + size])
    assert b"".join(seen + units.take_remainder()) == stream
