"""Fresh engines of every kind, and their first requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pdconn.tools.bench.serving.lineup import engine_specs
from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.proxy import running_proxy
from pdconn.tools.lab.spec import EngineSpec

ALONE = "alone"
TWO = "two"

_ANSWER_TOKENS = 8
_USES = 2
"""Ordinary requests that make an engine a used one."""


@dataclass(frozen=True)
class Kind:
    """Which engines, and what they did before their first request.

    Attributes:
        connector: of the pair, see ``pdconn.tools.bench.serving.lineup``; None has none.
        pair: whether they are two.
        keys: our own keys of both engines' configuration.
        warms: decode names prefill in ``warm_peers``.
        used: both have answered ordinary requests before.
        proxy: arguments of the proxy that requests go through; None: straight to the engines.
    """

    words: str
    connector: str | None = "pdconn"
    pair: bool = True
    keys: Mapping[str, Any] = field(default_factory=dict)
    warms: bool = False
    used: bool = False
    proxy: tuple[str, ...] | None = None


_SLEEPING = {"PDCONN_PATIENT_READERS": "1"}
"""vLLM's processes spin for a second after each message: of a pair, four for two cores."""

_NO_REHEARSAL: Mapping[str, Any] = MappingProxyType({"rehearse": False})

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        ALONE: Kind("one engine", None, pair=False),
        TWO: Kind("two engines without connector: the prompt to one, its last token to the other",
                  None),
        "cold": Kind("a pair that prepares nothing", keys=_NO_REHEARSAL),
        "rehearsed": Kind("a pair as it comes"),
        "warm-peers": Kind("with warm_peers", warms=True),
        "proxy": Kind("as cold, through pdconn proxy", keys=_NO_REHEARSAL, proxy=("--wait", "60")),
        "proxy-warm-up": Kind("through pdconn proxy --warm-up",
                              proxy=("--wait", "60", "--warm-up", "30")),
        "cold-used": Kind("as cold, both engines used before", keys=_NO_REHEARSAL, used=True),
        "rehearsed-used": Kind("as rehearsed, both engines used before", used=True),
        "warm-peers-used": Kind("as warm-peers, both engines used before", warms=True, used=True),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Taken:
    """One request; seconds from sending it to its first token, and to its last."""

    first_token_s: float
    last_token_s: float


def specs_of(name: str, model: Path, cores: str) -> list[EngineSpec]:
    """The engines of a kind, with ports of their own."""
    kind = KINDS[name]
    specs = engine_specs([kind.connector or ALONE], model, cores)
    if kind.connector is None and kind.pair:
        other = engine_specs([ALONE], model, cores)[0]
        specs.append(replace(other, cpus=None if other.cpus is None else (1,)))
    named = [
        replace(spec, name=f"{name}-{number}", env={**spec.env, **_SLEEPING})
        for number, spec in enumerate(specs)
    ]
    if kind.connector is None:
        return named
    lender = f"{named[0].host}:{named[0].side_channel_port}"
    keys = {**kind.keys, **({"warm_peers": [lender]} if kind.warms else {})}
    return [_with_keys(named[0], kind.keys), _with_keys(named[1], keys)]


def _with_keys(spec: EngineSpec, keys: Mapping[str, Any]) -> EngineSpec:
    config = dict(spec.kv_transfer_config or {})
    return replace(spec, kv_transfer_config={**config, "kv_connector_extra_config": dict(keys)})


@contextmanager
def running_alone(engines: Sequence[Engine], settle_s: float) -> Iterator[None]:
    """These engines run, and all others of the measurement stay frozen."""
    for engine in engines:
        engine.resume()
    time.sleep(settle_s)
    try:
        yield
    finally:
        for engine in engines:
            engine.pause()


def ask(
    name: str, engines: Sequence[Engine], prompts: Sequence[tuple[int, ...]], directory: Path
) -> list[Taken]:
    """The first requests of a kind's engines, one after the other."""
    kind, clients = KINDS[name], [Client(engine.url) for engine in engines]
    if kind.used:
        for client in clients:
            for prompt in make_prompts([len(prompts[0])] * _USES, seed=len(name)):
                client.stream(prompt, _ANSWER_TOKENS)
    if kind.proxy is None:
        return [_straight(kind, clients, prompt) for prompt in prompts]
    prefill, decode = (engine.url for engine in engines)
    with running_proxy([prefill], [decode], directory, args=kind.proxy) as url:
        return [_one(Client(url), prompt) for prompt in prompts]


def _straight(kind: Kind, clients: Sequence[Client], prompt: tuple[int, ...]) -> Taken:
    if not kind.pair:
        return _one(clients[0], prompt)
    began = time.perf_counter()
    if kind.connector is None:
        clients[0].complete(prompt, 1)
        ticket, prompt = None, prompt[-1:]
    else:
        ticket = prefill_only(clients[0], prompt)
    prefill_s = time.perf_counter() - began
    timed = clients[1].stream(prompt, _ANSWER_TOKENS, kv_transfer_params=ticket)
    return Taken(prefill_s + timed.first_token_s, prefill_s + timed.last_token_s)


def _one(client: Client, prompt: tuple[int, ...]) -> Taken:
    timed = client.stream(prompt, _ANSWER_TOKENS)
    return Taken(timed.first_token_s, timed.last_token_s)
