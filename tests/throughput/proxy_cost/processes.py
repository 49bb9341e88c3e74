"""Engines and routers that listen, as processes of their own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdconn.tools.lab.ports import LOCALHOST, free_ports, is_free
from pdconn.tools.lab.process import Process


@contextmanager
def listening(
    name: str, module: str, words: Sequence[object], port: int, place: Path
) -> Iterator[Process]:
    """A module run by Python with ``words``, once it listens; ends with the context."""
    command = [sys.executable, "-m", module, *map(str, words)]
    with started(name, command, port, place) as process:
        yield process


@contextmanager
def started(
    name: str,
    command: Sequence[str],
    port: int,
    place: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """A command, once it listens on ``port``; ends with the context."""
    log = place / f"{name}.log"
    log.write_bytes(b"")
    process = Process(name, command, log, env=env)
    try:
        give_up = time.monotonic() + 30
        while is_free(port):
            if process.ended() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"{name} does not listen: {process.tail()}")
            time.sleep(0.05)
        yield process
    finally:
        process.end_all()


@dataclass(frozen=True)
class Fleet:
    """Engines: where they are asked, and prefill's word with events."""

    prefill: str
    decode: str
    with_events: str


@contextmanager
def engines(place: Path) -> Iterator[Fleet]:
    """Prefill, which publishes events, and decode."""
    prefill, events, replay, decode = free_ports(4)
    fake = "tests.fakes.stream_engine"
    with (
        listening("prefill", fake, (prefill, events, replay), prefill, place),
        listening("decode", fake, (decode,), decode, place),
    ):
        url = f"http://{LOCALHOST}:{prefill}"
        publishing = f"events=tcp://{LOCALHOST}:{events},replay=tcp://{LOCALHOST}:{replay}"
        yield Fleet(url, f"http://{LOCALHOST}:{decode}", f"{url},{publishing}")
