"""Engines for fault tests, what happens beside a fault, and a victim in the right moment.

Three engines, started once and restarted where they die; their names in logs begin
with ``faults-``.  What is right is known from the session's engine without a connector::

    prefill ──► decode        over TCP, where data can come late; recomputes what fails
       └──────► failing       over UCX's default transports, 3 s late; fails what fails
    failing ──► decode        lends to the requests that go on beside a fault

A ``Tap`` (:mod:`tests.vllm.engines.tap`) stands in prefill's side channel, so a fault can happen
between two messages: a prefill engine that is stopped as its grant passes has lent for
certain, and will not answer the read.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pdconn.protocol.messages import Granted, Welcome
from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts
from pdconn.tools.lab.engine import Engine, wait_ready
from pdconn.tools.lab.lab_client import Client, prefill_only, prefill_then_decode
from pdconn.tools.lab.lab_errors import EngineDied, RequestRefused
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import (
    BLOCK,
    MAX_MODEL_LEN,
    Expected,
    Prompt,
    cache_beside,
    transfer_config,
)
from tests.vllm.engines.tap import Tap, Ticket

LEASE_S = 4.0
CLAIM_TIMEOUT_S = 10.0
DELAY_S = 3.0
"""How late ``failing`` posts its reads: a lease's renewal comes sooner, its end later."""
ASK_S = 60.0
OTHERS = 32
OTHERS_TOKENS = 12
PREFILL = "prefill-0"
"""Prefill's engine id, the same at every boot, so that only the incarnation differs."""

_FETCHING = re.compile(
    r'^vllm:num_requests_kv_fetch_by_stage{.*stage="in_progress".*} (\S+)$', re.M
)


def specs(model: Path) -> list[EngineSpec]:
    """``prefill``, ``decode`` and ``failing``."""
    http = free_ports(3)
    lending, helping = free_ports(2)
    late = {"reads": {"delay": 1.0, "delay_s": DELAY_S}}
    lease = {"kv_lease_duration": LEASE_S}
    patience = {"claim_timeout": CLAIM_TIMEOUT_S}
    shared = EngineSpec(
        name="faults",
        model=model,
        port=http[0],
        one_process=True,
        layout="BHLNC",
        prefix_caching=True,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
    )
    return [
        replace(
            shared,
            name="faults-prefill",
            side_channel_port=lending,
            kv_transfer_config={**transfer_config("kv_producer", **lease), "engine_id": PREFILL},
            num_blocks=256,  # a few prompts use every block anew
        ),
        replace(
            shared,
            name="faults-decode",
            port=http[1],
            kv_transfer_config=transfer_config("kv_consumer", policy="recompute", **patience),
            num_blocks=220,  # fewer than the requests beside a fault would like
            env={"UCX_TLS": "tcp"},
        ),
        replace(
            shared,
            name="faults-failing",
            port=http[2],
            side_channel_port=helping,
            kv_transfer_config=transfer_config("kv_both", debug_faults=late, **patience),
        ),
    ]


@dataclass
class Fleet:
    """The engines, fresh prompts, and the right answers."""

    expected: Expected
    prefill: Engine
    decode: Engine
    failing: Engine
    _seeds: Iterator[int] = field(default_factory=lambda: itertools.count(5000))

    def prompt(self, length: int = 500) -> Prompt:
        """One that no engine has seen."""
        return make_prompts([length], seed=next(self._seeds))[0]

    def lent(self, prompt: Prompt) -> Ticket:
        """Have it computed by ``prefill``; returns its ticket."""
        return dict(prefill_only(Client(self.prefill.url), prompt) or {})

    def wrong(self, prompt: Prompt, seen: Answer) -> str | None:
        """How ``seen`` differs from what one engine alone answers, or None."""
        difference = compare(self.expected.answer(prompt, len(seen.tokens)), seen)
        return None if difference is None else f"{len(prompt)} tokens: {difference}"

    def serves(self, engine: Engine) -> bool:
        """Whether ``engine`` answers a new prompt without a ticket, and rightly."""
        prompt = self.prompt(200)
        return self.wrong(prompt, Client(engine.url).complete(prompt, 6)) is None

    def hands_over(self, decode: Engine) -> bool:
        """Whether ``decode`` pulls a new prompt from ``prefill``, and answers rightly."""
        prompt = self.prompt(300)
        client = Client(decode.url)
        before = client.metrics().get("pdconn:pulls_total", 0.0)
        seen = prefill_then_decode(Client(self.prefill.url), client, prompt, 6)
        pulls = client.metrics()["pdconn:pulls_total"] - before
        return pulls == 1.0 and self.wrong(prompt, seen) is None

    def used(self, engine: Engine, give_up_s: float) -> float:
        """Share of the engine's blocks in use without requests; given up after a while."""
        client = Client(engine.url)
        give_up = time.monotonic() + give_up_s
        while True:
            client.complete((5, 6, 7), 1)
            used = client.metrics()["vllm:kv_cache_usage_perc"]
            if used == 0.0 or time.monotonic() > give_up:
                return used
            time.sleep(0.2)

    def await_blocks(self, engine: Engine) -> None:
        """Until a request there has its blocks and waits for its pull.

        Raises:
            TimeoutError: none does.
        """
        give_up = time.monotonic() + ASK_S
        while True:
            fetching = _FETCHING.search(Client(engine.url).get_text("/metrics"))
            if fetching is not None and float(fetching[1]) > 0:
                return
            if time.monotonic() > give_up:
                raise TimeoutError(f"{engine.spec.name}: no request waits for a pull")
            time.sleep(0.02)

    def revive(self, engine: Engine) -> None:
        """Start it again, on the same ports, if it is dead."""
        try:
            engine.check_alive()
        except EngineDied:
            engine.launch()
            wait_ready([engine])


@contextmanager
def fleet_of(model: Path, directory: Path, expected: Expected) -> Iterator[Fleet]:
    """Start the three engines."""
    with running(specs(model), directory, cache=cache_beside(model)) as engines:
        yield Fleet(expected, *engines)


@dataclass(frozen=True)
class Asked:
    """A request with a ticket: what it was, how it ended, and when (``time.monotonic``)."""

    prompt: Prompt
    outcome: Answer | RequestRefused
    took_s: float
    ended: float


def ask(engine: Engine, prompt: Prompt, ticket: Ticket, num_tokens: int = 24) -> Asked:
    """Ask ``engine`` with a ticket.

    Raises:
        OSError: it hung up, or was silent for ``ASK_S``.
    """
    began = time.monotonic()
    outcome: Answer | RequestRefused
    try:
        client = Client(engine.url, timeout_s=ASK_S)
        outcome = client.complete(prompt, num_tokens, kv_transfer_params=ticket)
    except RequestRefused as refused:
        outcome = refused
    ended = time.monotonic()
    return Asked(prompt, outcome, ended - began, ended)


def ask_during_stop(
    fleet: Fleet,
    tap: Tap,
    pool: ThreadPoolExecutor,
    num_tokens: int,
    first: Callable[[], object] = lambda: None,
) -> Future[Asked]:
    """Have ``decode`` read from a ``prefill`` that is stopped as its grant passes ``tap``.

    The greeting is held back until the request has its blocks, so that the read is
    posted on the grant; ``first`` is done before that.  Stopped when this returns.
    """
    prompt, go_on = fleet.prompt(), threading.Event()
    tap.at(Welcome, lambda: go_on.wait(ASK_S))
    stopped = tap.at(Granted, fleet.prefill.pause)
    ticket = tap.over(fleet.lent(prompt))
    asked = pool.submit(ask, fleet.decode, prompt, ticket, num_tokens)
    try:
        fleet.await_blocks(fleet.decode)
        first()
    finally:
        go_on.set()
    if not stopped.wait(ASK_S):
        raise TimeoutError("nothing was granted")
    return asked


class News:
    """What an engine has logged since this was made."""

    def __init__(self, engine: Engine) -> None:
        self._log = engine.log
        self._seen = len(self._log.read_text(encoding="utf-8"))

    def __call__(self) -> str:
        return self._log.read_text(encoding="utf-8")[self._seen :]


class Beside:
    """Requests that go on beside a fault: each client asks its own prompt again and again.

    Every other one begins with a ticket from ``failing``.  The block pool of ``decode`` is
    too small for all of them, so a block that is let go too early soon belongs to another request.
    On leaving, each asks once more, to see what became of cached blocks.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prompts = make_prompts([40 + 8 * n for n in range(OTHERS)], seed=77)
        self._pool = ThreadPoolExecutor(OTHERS)
        self._over = threading.Event()
        self._clients: list[Future[list[str]]] = []
        self.answered = 0

    def __enter__(self) -> Self:
        lender = Client(self._fleet.failing.url)
        with ThreadPoolExecutor(4) as pool:
            tickets = list(pool.map(lambda p: prefill_only(lender, p), self._prompts[::2]))
        for number, prompt in enumerate(self._prompts):
            ticket = tickets[number // 2] if number % 2 == 0 else None
            self._clients.append(self._pool.submit(self._go_on, prompt, ticket))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._pool.shutdown()

    def wrong(self) -> list[str]:
        """Every answer that was not right; call it when the block is left."""
        return [problem for client in self._clients for problem in client.result()]

    def _go_on(self, prompt: Prompt, ticket: Ticket | None) -> list[str]:
        client = Client(self._fleet.decode.url)
        answers = [client.complete(prompt, OTHERS_TOKENS, kv_transfer_params=ticket)]
        while not self._over.is_set():
            answers.append(client.complete(prompt, OTHERS_TOKENS))
        answers.append(client.complete(prompt, OTHERS_TOKENS))
        self.answered += len(answers)
        return [problem for seen in answers if (problem := self._fleet.wrong(prompt, seen))]
