"""A subscriber over real sockets, with a publisher that loses, garbles, dies and comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq
import zmq.asyncio

from pdconn.router.events.subscriber import EventSource, Status, Subscriber
from pdconn.router.events.tracker import ResetReason, State
from pdconn.router.prefix.kv_events import Batch
from pdconn.router.router_errors import BadSetting
from tests.router.events.publisher import END, Publisher, two_ports
from tests.router.events.rig import Recorder, rig, run, source


def test_a_late_joiner_knows_all_and_follows() -> None:
    async def test() -> None:
        async with rig() as made:
            await made.publisher.remove(1)
            await made.publisher.store(3)
            await made.sink.blocks_are(2, 3)
            status = made.subscriber.status
            assert (status.batches, status.events, status.lag_s) == (3, 3, 98.0)
            assert (status.gaps, status.malformed, made.sink.resets) == (0, 0, [])
            states = [one.state for one in made.sink.statuses]
            assert states[-1] is State.LIVE
            assert set(states) <= {State.SYNCING, State.LIVE}

    run(test())


def test_a_lost_batch_is_replayed() -> None:
    async def test() -> None:
        async with rig() as made:
            await made.publisher.remove(1, lost=True)
            await made.publisher.store(3)
            await made.sink.blocks_are(2, 3)
            assert made.publisher.asked == [0, 0]
            assert (made.subscriber.status.gaps, made.sink.resets) == (1, [])

    run(test())


def test_a_gap_that_is_not_filled_costs_all_and_is_called_incomplete() -> None:
    async def test() -> None:
        async with rig(replay_silence_s=2.5) as made:
            made.publisher.answers = False
            await made.publisher.remove(1, lost=True)
            await made.publisher.store(3)
            await made.sink.state_is(State.STALE)
            await made.sink.state_is(State.INCOMPLETE)
            assert (made.sink.blocks, made.sink.resets) == ({3}, [ResetReason.GAP.value])
            await made.publisher.publish({"type": "AllBlocksCleared"})
            await made.sink.state_is(State.LIVE)

    run(test())


def test_an_engine_that_comes_back_on_its_port_begins_anew() -> None:
    async def test() -> None:
        async with rig() as made:
            await made.publisher.store(3)
            await made.sink.blocks_are(1, 2, 3)
            await made.publisher.die()
            await made.sink.state_is(State.AWAY)
            made.publisher = Publisher(made.ports)
            for block in range(10, 15):  # its numbers go on behind those of the old engine
                await made.publisher.store(block, lost=True)
            await made.sink.blocks_are(*range(10, 15))
            await made.sink.state_is(State.LIVE)
            assert made.sink.resets == [ResetReason.RESTARTED.value]
            assert made.subscriber.status.restarts == 1
            await made.publisher.subscribed.wait()
            await made.publisher.remove(10)
            await made.sink.blocks_are(*range(11, 15))

    run(test())


GARBAGE = [
    (b"",),
    (b"", b"\0" * 8),
    (b"", b"\0" * 7, b"\x90"),
    (b"", END, b"\x90"),
    (b"", b"\0" * 8, b"\x90", b"more"),
]


def test_garbage_is_counted_and_passed_over() -> None:
    async def test() -> None:
        async with rig() as made:
            for frames in GARBAGE:
                await made.publisher.wire(*frames)
            await made.publisher.store(3)
            await made.sink.blocks_are(1, 2, 3)
            status = made.subscriber.status
            assert (status.malformed, status.gaps) == (len(GARBAGE), 0)

    run(test())


def test_garbage_in_a_replay_is_a_hole_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with rig() as made:
            send = made.publisher.send_answer

            async def garbling(peer: bytes, *frames: bytes) -> None:
                await send(peer, b"")
                await send(peer, b"", b"", b"short", b"\x90")
                await send(peer, *frames)

            monkeypatch.setattr(made.publisher, "send_answer", garbling)
            await made.publisher.store(3, lost=True)
            await made.publisher.store(4)
            await made.sink.blocks_are(1, 2, 3, 4)
            await made.sink.state_is(State.LIVE)
            assert made.subscriber.status.malformed >= 6

    run(test())


def test_a_payload_that_cannot_be_read_costs_all_that_was_known() -> None:
    async def test() -> None:
        async with rig() as made:
            await made.publisher.publish(None, payload=b"\xc1")
            await made.sink.state_is(State.INCOMPLETE)
            await made.publisher.store(3)
            await made.sink.blocks_are(3)
            assert made.sink.resets == [ResetReason.UNREADABLE.value]
            assert made.subscriber.status.malformed == 2

    run(test())


def test_an_event_that_cannot_be_read_is_counted() -> None:
    async def test() -> None:
        async with rig() as made:
            await made.publisher.publish({"type": "BlockMoved"})
            status = await made.sink.state_is(State.INCOMPLETE)
            assert (status.undecodable, made.sink.blocks) == (1, {1, 2})

    run(test())


def test_without_replay_a_late_joiner_is_incomplete_and_an_early_one_is_not() -> None:
    async def test(first: int, expected: State) -> None:
        ports = two_ports()
        publisher, sink = Publisher(ports), Recorder()
        for block in range(first):
            await publisher.store(block)
        alone = EventSource("a", 0, source(ports).events, None)
        subscriber = Subscriber(alone, sink)
        subscriber.start_receiving()
        try:
            await publisher.subscribed.wait()
            await sink.state_is(State.INCOMPLETE)
            await publisher.store(9)
            await sink.blocks_are(9)
            await publisher.store(10)
            await sink.blocks_are(9, 10)
            assert subscriber.status.state is expected
        finally:
            await subscriber.close()
            await publisher.die()

    run(test(first=0, expected=State.LIVE))
    run(test(first=2, expected=State.INCOMPLETE))


def test_a_sink_that_fails_is_logged_and_nothing_stays_open(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with rig() as made:

            def fail(source: EventSource, batch: Batch) -> None:
                raise RuntimeError("the index is broken")

            monkeypatch.setattr(made.sink, "apply_batch", fail)
            (task,) = (one for one in asyncio.all_tasks() if "KV events" in one.get_name())
            await made.publisher.store(3)
            await asyncio.wait([task])
            assert made.subscriber.status.state is State.AWAY

    run(test())
    assert "background task failed task='KV events of a rank 0'" in caplog.text


def test_closing_twice_or_before_starting_leaves_nothing_open() -> None:
    async def test() -> None:
        never = Subscriber(source(two_ports()), Recorder())
        await never.close()
        never.start_receiving()
        await never.close()
        idle = Subscriber(source(two_ports()), Recorder())
        idle.start_receiving()
        idle.start_receiving()
        await asyncio.sleep(0)
        await idle.close()
        await idle.close()
        assert idle.status == Status()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(test())


def test_subscribers_may_share_a_context() -> None:
    async def test() -> None:
        context = zmq.asyncio.Context()
        ports, sinks = two_ports(), [Recorder(), Recorder()]
        publisher = Publisher(ports)
        await publisher.store(1)
        both = [Subscriber(source(ports), sink, context=context) for sink in sinks]
        for subscriber in both:
            subscriber.start_receiving()
        for sink in sinks:
            await sink.blocks_are(1)
        await asyncio.gather(*(subscriber.close() for subscriber in both))
        await publisher.die()
        context.term()  # hangs where a socket is still open

    run(test())


@pytest.mark.parametrize(
    "address",
    ["", "tcp://*:5557", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536",
     "tcp://:5557", "ipc:///tmp/x", "http://host:5557", "tcp://host:5557/", "tcp://a b:1"],
)  # fmt: skip
def test_addresses_that_make_no_sense_are_refused(address: str) -> None:
    with pytest.raises(BadSetting, match="events: expected tcp://HOST:PORT"):
        EventSource("a", 0, address, None)
    with pytest.raises(BadSetting, match="replay: expected tcp://HOST:PORT"):
        EventSource("a", 0, "tcp://[::1]:5557", address)
    with pytest.raises(BadSetting, match="rank"):
        EventSource("a", -1, "tcp://host:5557", None)


# --- vLLM's own publisher -----------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm() -> Any:
    return pytest.importorskip("vllm.distributed.kv_events")


def test_vllms_publisher_is_followed_from_the_start_and_across_a_gap(vllm: Any) -> None:
    ports = two_ports()
    events, replay = (f"tcp://*:{port}" for port in ports)
    publisher = vllm.ZmqEventPublisher(0, events, replay, topic="kv")

    def publish(block: int) -> None:
        stored = vllm.BlockStored([block], None, [1] * 16, 16, None, "GPU", None)
        publisher.publish(vllm.KVEventBatch(ts=1.0, events=[stored]))

    async def test() -> None:
        sink = Recorder()
        address = source(ports)
        subscriber = Subscriber(EventSource("a", 0, address.events, address.replay, "kv"), sink)
        for block in range(3):
            publish(block)
        subscriber.start_receiving()
        try:
            await sink.blocks_are(0, 1, 2)
            await sink.state_is(State.LIVE)
            next(publisher._seq_gen)  # a batch that vLLM numbers and then fails to send
            known = 3
            while not sink.resets:  # an early batch may pass before PUB knows of us
                publish(known)
                known += 1
                await asyncio.sleep(0.01)
            await sink.state_is(State.INCOMPLETE)
            publish(known)
            await sink.until(lambda: known in sink.blocks)
            assert sink.resets == [ResetReason.GAP.value]
        finally:
            await subscriber.close()

    try:
        run(test())
    finally:
        publisher.shutdown()


def test_an_idle_pod_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last batch may be old, or have been replayed: neither is a lag of now."""

    async def test() -> None:
        async with rig() as made:
            assert made.subscriber.status.lag_s is None  # what came was replayed
            await made.publisher.store(3)
            await made.sink.blocks_are(1, 2, 3)
            assert made.subscriber.status.lag_s == 99.0
            monkeypatch.setattr(made.subscriber._seen, "lag_until_s", 0.0)
            assert made.subscriber.status.lag_s is None
            await made.publisher.store(4)
            await made.sink.blocks_are(1, 2, 3, 4)
            assert made.subscriber.status.lag_s == 98.0

    run(test())
