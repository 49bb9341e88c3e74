"""The subscriber beside vLLM's own publisher: what is logged of a healthy and of a silent one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdconn.router.events.subscriber import (
    LOOK_EVERY_S,
    SILENT_TOKENS,
    EventSource,
    Subscriber,
)
from pdconn.router.events.tracker import State
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop
from tests.router.events.publisher import Publisher, two_ports
from tests.router.events.rig import Recorder, run, source

SILENCE_S = 0.6  # vLLM's publisher looks for requests every 0.1 s


@pytest.fixture(scope="module")
def vllm() -> Any:
    return pytest.importorskip("vllm.distributed.kv_events")


@contextmanager
def publishing(vllm: Any, endpoint: str, replay: str | None) -> Iterator[Callable[[int], None]]:
    """vLLM's publisher; what this yields publishes a block."""
    publisher = vllm.ZmqEventPublisher(0, endpoint, replay)

    def publish(block: int) -> None:
        stored = vllm.BlockStored([block], None, [1] * 16, 16, None, "GPU", None)
        publisher.publish(vllm.KVEventBatch(ts=1.0, events=[stored]))

    try:
        yield publish
    finally:
        publisher.shutdown()


def timed_out(caplog: pytest.LogCaptureFixture) -> int:
    return sum("replay timed out" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize("replays", [True, False])
def test_a_healthy_publisher_is_followed_without_a_word_about_its_replay(
    vllm: Any, replays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ports = two_ports()
    address = source(ports)
    endpoint, replay = (f"tcp://*:{port}" for port in ports)

    async def test() -> None:
        sink = Recorder()
        known = EventSource("a", 0, address.events, address.replay if replays else None)
        subscriber = Subscriber(known, sink, replay_silence_s=SILENCE_S)
        subscriber.start_receiving()
        try:
            await sink.state_is(State.LIVE if replays else State.INCOMPLETE)
            await asyncio.sleep(SILENCE_S)
            block = 0
            while len(sink.blocks) < 3:  # an early batch may pass before PUB knows of us
                publish(block)
                block += 1
                await asyncio.sleep(0.02)
        finally:
            await subscriber.close()

    caplog.set_level(logging.WARNING)
    with publishing(vllm, endpoint, replay if replays else None) as publish:
        run(test())
    assert timed_out(caplog) == 0


def test_a_replay_that_is_not_answered_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Negative control."""

    async def test() -> None:
        ports, sink = two_ports(), Recorder()
        publisher = Publisher(ports)
        publisher.answers = False
        subscriber = Subscriber(source(ports), sink, replay_silence_s=SILENCE_S)
        subscriber.start_receiving()
        try:
            await publisher.subscribed.wait()
            await sink.state_is(State.INCOMPLETE)
            await asyncio.sleep(SILENCE_S)
            for block in range(3):
                await publisher.store(block)
                await sink.until(lambda block=block: block in sink.blocks)
        finally:
            await subscriber.close()
            await publisher.die()

    caplog.set_level(logging.WARNING)
    run(test())
    assert timed_out(caplog) == 1


# --- an engine that is at work and publishes nothing -----------------------------------------

LOOK_S = 0.3
NUM_LOOKS = 5


def silences(
    vllm: Any,
    caplog: pytest.LogCaptureFixture,
    endpoint: str,
    *,
    at_work: bool = True,
    publishes: bool = True,
    of_each_look: int = SILENT_TOKENS,
) -> list[str]:
    """What is logged of an engine with this ``endpoint`` within some looks at it."""
    ports = two_ports()
    computed = 0

    def more() -> int | None:
        nonlocal computed
        computed += of_each_look
        return computed if at_work else None

    async def test() -> None:
        known = EventSource("a", 0, source(ports).events, None)
        subscriber = Subscriber(known, Recorder(), computed=more, look_every_s=LOOK_S)
        subscriber.start_receiving()
        try:
            for block in range(NUM_LOOKS):
                if publishes:
                    publish(block)
                await asyncio.sleep(LOOK_S)
            said = subscriber.status.silent
            logged = [one.getMessage() for one in caplog.records if "KV events" in one.getMessage()]
            assert (said is not None) == any(said and said in line for line in logged)
        finally:
            await subscriber.close()

    caplog.set_level(logging.WARNING)
    with publishing(vllm, endpoint.replace("PORT", str(ports[0])), None) as publish:
        run(test())
    return [one.getMessage() for one in caplog.records if "all blocks" not in one.getMessage()]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_an_endpoint_that_vllm_connects_and_never_binds_is_named_within_seconds(
    vllm: Any, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    (line,) = silences(vllm, caplog, f"tcp://{host}:PORT")
    assert "nothing listens at tcp://127.0.0.1:" in line
    assert '"endpoint": "tcp://*:' in line


def test_an_endpoint_that_vllm_binds_is_not_complained_of(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Negative control."""
    assert silences(vllm, caplog, "tcp://*:PORT") == []


def test_an_engine_that_does_not_answer_either_is_not_complained_of(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Health says so; and one that loads its weights has bound nothing yet."""
    assert silences(vllm, caplog, "tcp://127.0.0.1:PORT", at_work=False) == []


def test_an_engine_that_computes_and_publishes_nothing_is_named(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = silences(vllm, caplog, "tcp://*:PORT", publishes=False)
    assert "publishes no event" in line
    assert "--enable-prefix-caching" in line


def test_an_engine_that_computes_nothing_may_publish_nothing(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert silences(vllm, caplog, "tcp://*:PORT", publishes=False, of_each_look=0) == []


def test_seconds_are_few() -> None:
    assert 2 * LOOK_EVERY_S <= 6


@pytest.mark.parametrize("binds", [False, True])
@in_loop
async def test_the_router_and_its_page_say_that_nothing_is_published(
    vllm: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, binds: bool
) -> None:
    """From the engine's own page it knows that the engine is at work."""
    monkeypatch.setitem(Subscriber.__init__.__kwdefaults__, "look_every_s", LOOK_S)
    port, _ = two_ports()
    host = "*" if binds else "127.0.0.1"
    with publishing(vllm, f"tcp://{host}:{port}", None) as publish:
        publish(1)
        events = f"events=tcp://127.0.0.1:{port}"
        async with deployment(word=lambda engine: f"{engine.url},{events}") as d:
            for engine in (*d.prefill, *d.decode):
                engine.metrics_page = "vllm:prompt_tokens_total 100.0\n"
            await d.proxy.router.loads.poll_now()
            await asyncio.sleep(NUM_LOOKS * LOOK_S)
            state = json.loads((await d.send("/debug/state", method="GET")).body)
    said = [one["status"]["silent"] for one in state["pods"]]
    lines = [one.getMessage() for one in caplog.records if "nothing listens" in one.getMessage()]
    if binds:
        assert (said, lines) == ([None, None], [])
    else:
        assert said == [f"nothing listens at tcp://127.0.0.1:{port}"] * 2
        assert len(lines) == 2
