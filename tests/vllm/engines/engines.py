"""Engine pairs for the tests against real vLLM, and what a single engine answers.

One pair is started per configuration and serves every test that asks for it.  The
single engine runs first, answers every prompt once, and is gone before the pairs.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdconn.lab.client import Client, prefill_only
from pdconn.lab.compare import Answer, make_prompts, spread_lengths
from pdconn.lab.engine import Engine, running
from pdconn.lab.ports import free_ports
from pdconn.lab.proxy import running_proxy
from pdconn.lab.spec import EngineSpec

MAX_MODEL_LEN = 2048
MAX_TOKENS = 6
BLOCK = 32
WINDOW = 64
LEASE_S = 15.0
EDGES = (BLOCK, WINDOW, WINDOW + BLOCK - 1, 127, 159, 10 * BLOCK)
"""Lengths around which blocks, windows and retention change; 95, 127, 159 are where
prefill would drop a block that decode needs."""

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Configuration:
    """One pair of engines."""

    layout: str
    prefix_caching: bool
    one_process: bool
    policy: str
    num_blocks: int | None = None
    verify: str = "off"
    guarded: bool = False
    warms: bool = False

    def __str__(self) -> str:
        return f"{self.layout}-{'caching' if self.prefix_caching else 'plain'}"


CONFIGURATIONS = tuple(
    Configuration(
        layout,
        prefix_caching,
        # Once with a worker in a process of its own, as engines of several ranks have.
        one_process=not (layout == "BHLNC" and prefix_caching),
        policy="fail" if prefix_caching else "recompute",
        # Few enough blocks that 32 requests at once wait for each other's.
        num_blocks=None if prefix_caching else 220,
        # Two layouts for checksums, one for a side channel with a secret.
        verify="off" if layout == "BHLNC" else "sample" if prefix_caching else "always",
        guarded=layout == "BHLNC",
        warms=layout == "BHLNC",
    )
    for layout in ("LBHNC", "BLHNC", "BHLNC")
    for prefix_caching in (True, False)
)


SPOILED_BESIDE = next(c for c in CONFIGURATIONS if str(c) == "BLHNC-plain")
"""Beside this pair run two decode engines that flip a byte of every pull: ``spoiled``, which
believes it, and ``doubting``, which compares checksums."""


def one_after_another() -> list[Prompt]:
    """200 prompts from 1 token to the model's limit; the last ones share prefixes."""
    longest = MAX_MODEL_LEN - MAX_TOKENS
    prompts = make_prompts(spread_lengths(160, longest, seed=3, edges=EDGES), seed=4)
    tails = make_prompts(spread_lengths(40, 300, seed=5, edges=(BLOCK,)), seed=6)
    grown = [(prompts[number] + tail)[:longest] for number, tail in enumerate(tails)]
    return [*prompts, *grown]


def all_at_once() -> list[Prompt]:
    """32 prompts, among them several of equal beginning."""
    prompts = make_prompts(spread_lengths(24, 1200, seed=7, edges=(WINDOW,)), seed=8)
    return [*prompts, *(prompts[n] + prompts[n + 1][:50] for n in range(8))]


def whole_blocks() -> list[Prompt]:
    """Prompts whose pulled tokens fill their blocks, so that every byte pulled matters."""
    return make_prompts([8 * BLOCK + 1] * 8, seed=10)


def pairing_prompts(number: int) -> tuple[list[Prompt], list[Prompt]]:
    """For one pairing of topologies: one after another, and at once.

    The last of the single ones goes on where the one before it ended; no others share any.
    """
    longest = MAX_MODEL_LEN - MAX_TOKENS
    lengths = [2, BLOCK, 3 * BLOCK - 1, 130, longest, 700, 90]
    *single, more = make_prompts(lengths, seed=100 + 2 * number)
    return [*single, single[-1] + more], make_prompts(
        [40, 64, 300, 90, 200, 33], seed=101 + 2 * number
    )


class Expected:
    """What one engine alone answers, by prompt; asked once."""

    def __init__(self, client: Client, prompts: Sequence[Prompt]) -> None:
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda prompt: client.complete(prompt, MAX_TOKENS), prompts)
            self._answers: dict[Prompt, Answer] = dict(zip(prompts, answers, strict=True))

    def __getitem__(self, prompt: Prompt) -> Answer:
        return self._answers[prompt]


def transfer_config(role: str, **extra: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` of a test engine; ``extra`` are our own keys."""
    policy = extra.pop("policy", "fail")
    return {
        "kv_connector": "PdConnector",
        "kv_connector_module_path": "pdconn.vllm",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


@dataclass(frozen=True)
class PdPair:
    """A prefill and a decode engine, and clients to them."""

    configuration: Configuration
    prefill_engine: Engine
    decode_engine: Engine
    others: tuple[Engine, ...]

    @property
    def prefill(self) -> Client:
        return Client(self.prefill_engine.url)

    @property
    def decode(self) -> Client:
        return Client(self.decode_engine.url)

    @property
    def verifies(self) -> bool:
        """Whether checksums are compared."""
        return self.configuration.verify != "off"

    def has_said(self, text: str, seconds: float = 20.0) -> bool:
        """Whether decode has logged ``text``, which it may do a little after it answered."""
        give_up = time.monotonic() + seconds
        while text not in self.decode_engine.log.read_text():
            if time.monotonic() > give_up:
                return False
            time.sleep(0.05)
        return True

    @contextmanager
    def proxy(self) -> Iterator[str]:
        """``pdconn proxy`` over the pair; its URL."""
        directory = self.decode_engine.log.parent
        with running_proxy([self.prefill_engine.url], [self.decode_engine.url], directory) as url:
            yield url

    @contextmanager
    def lending(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Prefill has computed and lent these; decode pulls them in the end."""
        tickets = [prefill_only(self.prefill, prompt) for prompt in prompts]
        yield
        for prompt, ticket in zip(prompts, tickets, strict=True):
            self.decode.complete(prompt, 1, kv_transfer_params=ticket)

    def lent_after_one_more(self, seconds: float = LEASE_S / 3) -> float:
        """Share of prefill's blocks in use after one more request, or some, to settle.

        The request is an ordinary one: it lends nothing.  Given up after ``seconds``,
        long before a lease would end by itself.
        """
        return self.used(self.prefill, seconds)

    @staticmethod
    def used(client: Client, seconds: float = LEASE_S / 3) -> float:
        """Share of an engine's blocks in use, as :meth:`lent_after_one_more`."""
        give_up = time.monotonic() + seconds
        while True:
            client.complete((5, 6, 7), 1)
            used = client.metrics()["vllm:kv_cache_usage_perc"]
            if used == 0.0 or time.monotonic() > give_up:
                return used
            time.sleep(0.1)


def engine(
    name: str,
    model: Path,
    configuration: Configuration,
    role: str,
    core: int,
    **extra: Any,
) -> EngineSpec:
    """One engine of a pair; ``extra`` goes into our part of the configuration."""
    port, side = free_ports(2)
    cores = os.cpu_count() or 1
    producer = role == "kv_producer"
    extra.setdefault("verify", configuration.verify)
    if producer:
        extra["kv_lease_duration"] = LEASE_S
    if configuration.guarded:
        extra["secret_file"] = str(secret_beside(model))
    return EngineSpec(
        name=name,
        model=model,
        port=port,
        side_channel_port=side if producer else None,
        kv_transfer_config=transfer_config(role, policy=configuration.policy, **extra),
        layout=configuration.layout,
        prefix_caching=configuration.prefix_caching,
        one_process=configuration.one_process,
        cpus=(core % cores,) if cores > 1 and not configuration.one_process else None,
        num_blocks=None if producer else configuration.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
    )


def secret_beside(model: Path) -> Path:
    """A file with a secret that all engines of a model share."""
    path = model.with_suffix(".secret")
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
    return path


def cache_beside(model: Path) -> Path:
    """What vLLM finds out about a model's class in ten seconds, for all its engines."""
    return model.with_suffix(".vllm-cache")


@contextmanager
def pair_of(
    configuration: Configuration,
    model: Path,
    directory: Path,
    others: Mapping[str, EngineSpec] | None = None,
) -> Iterator[PdPair]:
    """Start a pair, with ``others`` beside it."""
    lending = engine("prefill", model, configuration, "kv_producer", 0)
    known = [f"{lending.host}:{lending.side_channel_port}"] if configuration.warms else []
    specs = [
        lending,
        engine("decode", model, configuration, "kv_consumer", 1, warm_peers=known),
        *(others or {}).values(),
    ]
    with running(specs, directory, cache=cache_beside(model)) as (prefill, decode, *rest):
        pair = PdPair(configuration, prefill, decode, tuple(rest))
        yield pair
        # Leases that a test left end by themselves.
        assert pair.lent_after_one_more(seconds=2 * LEASE_S) == 0.0
        assert pair.used(pair.decode) == 0.0
    ends = {engine.spec.name: engine.stop() for engine in (prefill, decode, *rest)}
    assert {name: end and end.killed for name, end in ends.items()} == dict.fromkeys(ends, ())


@contextmanager
def alone(model: Path, directory: Path) -> Iterator[Client]:
    """An engine without a connector."""
    spec = EngineSpec(
        name="alone",
        model=model,
        port=free_ports(1)[0],
        one_process=True,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
        kv_cache_mib=512,
    )
    with running([spec], directory, cache=cache_beside(model)) as (engine,):
        yield Client(engine.url)
