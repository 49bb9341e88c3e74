"""One phase: streams of an engine, and requests of one kind that arrive beside them."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, lend_prefix
from pdconn.tools.lab.spec import SERVED_NAME
from tests.throughput.engines.partner import LendingPartner, PullingPartner
from tests.throughput.engines.pinned import engine_core, threads_of

Prompt = tuple[int, ...]
Asking = Callable[[], Mapping[str, Any] | None]

KINDS = ("quiet", "cached", "instant", "pulled")
LENT = "lent"
INSTANT = "instant"
"""As ``tests.throughput.engines.timed`` reads it; that imports vLLM."""

_CACHED = 8
_LEAD = 8
"""Tokens of a stream that do not count: until all streams run, and when the first ends."""


@dataclass
class Phase:
    """One phase; seconds.

    Attributes:
        began, ended: while every stream ran, as ``time.monotonic`` tells.
        seen: between tokens, as clients saw them.
        asked: how many requests came beside the streams.
        loop_s, others_s: processor time of the loop, and of the process's other threads.
        late_s: how long the loop waited for its core.
        steps: between ends of steps, without waiting for the core; ``raw``: with it.
    """

    kind: str
    began: float
    ended: float
    seen: list[float]
    asked: int
    loop_s: float
    others_s: float
    late_s: float
    steps: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)


def stream(engine: Engine, prompt: Prompt, tokens: int) -> list[float]:
    """Arrival time of each token."""
    parts = urlsplit(engine.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    body = {
        "model": SERVED_NAME, "prompt": list(prompt), "max_tokens": tokens,
        "temperature": 0.0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    came = [
        time.monotonic() for line in connection.getresponse() if line.startswith(b'data: {"id"')
    ]
    connection.close()
    return came


@dataclass(frozen=True)
class Used:
    """Processor time of an engine's core so far, in seconds; ``late_s`` as of a phase."""

    loop_s: float
    others_s: float
    late_s: float

    @classmethod
    def of(cls, core: int) -> Used:
        """As the kernel's scheduler counts."""
        others = 0.0
        for thread in threads_of(core):
            try:
                ran, waited, _ = (
                    Path(f"/proc/{core}/task/{thread}/schedstat")
                    .read_text(encoding="utf-8")
                    .split()
                )
            except OSError:
                continue
            if thread == core:
                loop, late = int(ran), int(waited)
            else:
                others += int(ran)
        return cls(loop / 1e9, others / 1e9, late / 1e9)


class Bench:
    """One engine, its partner and their requests."""

    def __init__(
        self,
        engine: Engine,
        partner: LendingPartner,
        reader: PullingPartner,
        options: argparse.Namespace,
    ) -> None:
        self._engine, self._partner, self._options = engine, partner, options
        self._reader = reader
        self._core = engine_core(engine.pid)
        self._client = Client(engine.url)
        self._seeds = itertools.count(1_000)
        self._cached = make_prompts([options.prompt] * _CACHED, seed=5)

    def phase(self, kind: str) -> Phase:
        """Let all streams run to their end, with requests of ``kind`` beside them."""
        options = self._options
        asking = self._prepare(kind)
        streams = make_prompts([32] * options.streams, seed=next(self._seeds))
        over = threading.Event()
        with ThreadPoolExecutor(options.streams + 1) as pool:
            before = Used.of(self._core)
            running = [pool.submit(stream, self._engine, p, options.tokens) for p in streams]
            pacing = pool.submit(self._pace, asking, over)
            came = [each.result() for each in running]
            after = Used.of(self._core)
            over.set()
            asked = pacing.result()
        began, ended = max(c[_LEAD] for c in came), min(c[-_LEAD] for c in came)
        seen = [b - a for c in came for a, b in itertools.pairwise(c) if began < a and b < ended]
        return Phase(
            kind, began, ended, seen, asked,
            after.loop_s - before.loop_s,
            after.others_s - before.others_s,
            after.late_s - before.late_s,
        )  # fmt: skip

    def _prepare(self, kind: str) -> Iterator[Callable[[], Any]]:
        """Requests, encoded before they are sent."""
        if kind in ("cached", LENT):
            for prompt in self._cached:  # pulls since may have pushed them out
                self._client.complete(prompt, 1)
            if kind == LENT:
                return iter([self._be_lent(prompt) for prompt in self._cached] * 500)
            return iter([self._ask(p, lambda: None) for p in self._cached] * 500)
        if kind == "quiet":
            return iter(())
        options = self._options
        count = int(options.rate * options.most_s)
        prompts = make_prompts([options.prompt] * count, seed=next(self._seeds))
        if kind == "instant":
            return iter([self._ask(p, lambda: {INSTANT: True}) for p in prompts])
        return iter([self._ask(p, self._lending(p)) for p in prompts])

    def _lending(self, prompt: Prompt) -> Asking:
        return lambda: self._partner.lend(prompt)

    def _be_lent(self, prompt: Prompt) -> Callable[[], None]:
        """Ask for a prompt but its last token, and pull it."""

        def pull() -> None:
            ticket = lend_prefix(self._client, prompt, len(prompt) - 1)
            if ticket is None or "remote_block_ids" not in ticket:
                raise RuntimeError(f"expected a ticket for {len(prompt) - 1} tokens, got {ticket}")
            self._reader.pull(self._reader.hold(ticket))

        return pull

    def _ask(self, prompt: Prompt, params: Asking) -> Callable[[], Any]:
        return lambda: self._client.complete(prompt, 1, kv_transfer_params=params())

    def _pace(self, asking: Iterator[Callable[[], Any]], over: threading.Event) -> int:
        """Send requests at a steady rate until ``over``; returns the number of answers."""
        futures: list[Future[Any]] = []
        with ThreadPoolExecutor(16) as pool:
            due = time.monotonic()
            for ask in asking:
                if over.wait(max(0.0, due - time.monotonic())):
                    break
                futures.append(pool.submit(ask))
                due += 1 / self._options.rate
        for future in futures:
            future.result()
        return len(futures)
