"""The contestants of a measurement; their requests go to prefill and decode without a router.

A connector that pulls gets decode's request once prefill has answered, with its ticket.  One that
pushes is asked as its routers ask: both legs at once, so that decode has registered its blocks
before prefill is done.  The hand-over begins with prefill's answer for either.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pdconn.protocol.early import EarlyTicket
from pdconn.router.openai.bodies import lend_params
from pdconn.tools.bench.serving.lineup import CONNECTORS, assign_engines
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, Timed, prefill_only

#: The answer goes on after its first token, as answers do.
ANSWER_TOKENS = 8

ALONE = "alone"

PUSHING = frozenset({"in-tree-push"})
FOLLOWING = frozenset(name for name, one in CONNECTORS.items() if one.streams)

_WAKING = 5
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Taken:
    """One prompt's way through a contestant, in seconds.

    Attributes:
        prefill_s: the prefill engine's request, sent to answered; of an engine
            alone, zero.
        first_s: from prefill's answer to decode's first streamed token; of an
            engine alone, from sending the only request.
        timed: the answer.
    """

    prefill_s: float
    first_s: float
    timed: Timed


@dataclass(frozen=True)
class Contestant:
    """Engines that answer prompts together: one alone, or prefill and decode."""

    name: str
    engines: tuple[Engine, ...]
    _tickets: list[Mapping[str, Any]] = field(default_factory=list)

    def answer(self, prompt: Sequence[int]) -> Taken:
        """Put one prompt through and time it."""
        if self.name in PUSHING:
            return pushed(*self.engines, prompt)
        if self.name in FOLLOWING and self._tickets:
            return followed(*self.engines, prompt, self.ticket)
        first, *rest = (Client(engine.url, _TIMEOUT_S) for engine in self.engines)
        if not rest:
            timed = first.stream(prompt, ANSWER_TOKENS)
            return Taken(0.0, timed.first_token_s, timed)
        prefill_s, ticket = _prefill(first, prompt)
        if ticket is not None:
            self._tickets.append(ticket)
        timed = rest[0].stream(prompt, ANSWER_TOKENS, kv_transfer_params=ticket)
        return Taken(prefill_s, timed.first_token_s, timed)

    @property
    def ticket(self) -> Mapping[str, Any]:
        """A ticket of its prefill engine, which has answered a prompt before."""
        return self._tickets[0]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let its engines run, and freeze them afterwards.

        Frozen engines use no processor time while another contestant is measured.
        """
        for engine in self.engines:
            engine.resume()
        try:
            for engine in self.engines:
                for _ in range(_WAKING):  # a frozen process has lost its processor caches
                    Client(engine.url).complete([4, 5, 6], 2)
            yield
        finally:
            for engine in self.engines:
                engine.pause()


def pushed(prefill: Engine, decode: Engine, prompt: Sequence[int]) -> Taken:
    """Ask decode while prefill computes, as vLLM's proxy for NixlPushConnector does.

    Decode is told where prefill is, from prefill's configuration.  Both requests have one id, by
    which prefill finds the blocks that decode has registered for its prompt.
    """
    config = prefill.spec.kv_transfer_config or {}
    request = f"push-{secrets.token_hex(8)}"
    place = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": config["engine_id"],
        "remote_host": prefill.spec.host,
        "remote_port": prefill.spec.side_channel_port,
        "remote_request_id": request,
        "tp_size": prefill.spec.tensor_parallel,
        "pp_size": 1,
    }
    return _both(prefill, decode, prompt, lend_params(), place, request_id=request)


def followed(prefill: Engine, decode: Engine, prompt: Sequence[int], like: object) -> Taken:
    """Ask both at once, as our router does; ``like``: an earlier ticket of prefill."""
    early = EarlyTicket.like(like, secrets.token_hex(16))
    lend = {**lend_params(), "pdconn": {"stream": early.stream}}
    return _both(prefill, decode, prompt, lend, early.to_params())


def _both(
    prefill: Engine,
    decode: Engine,
    prompt: Sequence[int],
    lend: Mapping[str, Any],
    place: Mapping[str, Any],
    **more: Any,
) -> Taken:
    first, second = (Client(engine.url, _TIMEOUT_S) for engine in (prefill, decode))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(second.stream, prompt, ANSWER_TOKENS, kv_transfer_params=place, **more)
        began = time.perf_counter()
        first.complete(prompt, 1, kv_transfer_params=lend, **more)
        answered = time.perf_counter()
        timed = asked.result()
    return Taken(answered - began, timed.sent_s + timed.first_token_s - answered, timed)


def _prefill(client: Client, prompt: Sequence[int]) -> tuple[float, Mapping[str, Any] | None]:
    began = time.perf_counter()
    ticket = prefill_only(client, prompt)
    return time.perf_counter() - began, ticket


def contestants(names: Sequence[str], engines: Sequence[Engine]) -> list[Contestant]:
    """Deal ``engines``, started from ``engine_specs(names)``, back to their names."""
    return [Contestant(name, dealt) for name, dealt in assign_engines(names, engines)]
