"""Engine pairs for the tests against real vLLM, and what a single engine answers.

One pair is started per configuration and serves every test that asks for it.  The single
engine lives as long as the session and answers every prompt once, when it is first needed.
Two pairs are enough for one case of every law (``make test``); the others differ from them
in layout and prefix caching and belong to ``make test-matrix``.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts, spread_lengths
from pdconn.tools.lab.engine import Engine, stop_all, wait_ready
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.proxy import running_proxy
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import ForkedProcess, running

MAX_MODEL_LEN = 2048
KV_CACHE_MIB = 128
"""Of an engine that is to hold all prompts of a test.  Most of what an engine's start takes the
kernel is to find this memory and to make huge pages of it."""
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
    matrix: bool = True

    def __str__(self) -> str:
        return f"{self.layout}-{'caching' if self.prefix_caching else 'plain'}"


CONFIGURATIONS = tuple(
    Configuration(
        layout,
        prefix_caching,
        # Once with a worker in a process of its own, as engines of several ranks have.
        one_process=not (layout == "BHLNC" and prefix_caching),
        policy="fail" if prefix_caching else "recompute",
        # Few enough blocks that 32 requests at once wait for each other's, and that 100 longer
        # ones are preempted; once with prefix caching.
        num_blocks=220 if not prefix_caching or layout == "BLHNC" else None,
        # Two layouts for checksums, one for a side channel with a secret.
        verify="off" if layout == "BHLNC" else "sample" if prefix_caching else "always",
        guarded=layout == "BHLNC",
        warms=layout == "BHLNC",
        matrix=(layout, prefix_caching) not in {("BHLNC", True), ("BLHNC", False)},
    )
    for layout in ("LBHNC", "BLHNC", "BHLNC")
    for prefix_caching in (True, False)
)


CORRUPTED_BESIDE = next(c for c in CONFIGURATIONS if str(c) == "BLHNC-plain")
"""Beside this pair run two decode engines that flip a byte of every pull: ``trusting``, which
believes it, and ``verifying``, which compares checksums."""

PREEMPTING = next(c for c in CONFIGURATIONS if str(c) == "BLHNC-caching")
"""Its decode engine has prefix caching, and too few blocks for the requests that it admits."""

WIDE_BESIDE = next(c for c in CONFIGURATIONS if str(c) == "BHLNC-caching")
"""Beside this pair runs ``wide``, an engine of two ranks that pulls from its prefill engine and
lends to its decode engine."""


def one_after_another(every: int = 1) -> list[Prompt]:
    """200 prompts from 1 token to the model's limit; the last ones share prefixes.

    Args:
        every: leave out all but so many, as in 1 of 3; those of ``EDGES`` are kept.
    """
    longest = MAX_MODEL_LEN - MAX_TOKENS
    prompts = make_prompts(spread_lengths(160, longest, seed=3, edges=EDGES), seed=4)
    tails = make_prompts(spread_lengths(40, 300, seed=5, edges=(BLOCK,)), seed=6)
    grown = [(prompts[number] + tail)[:longest] for number, tail in enumerate(tails)]
    kept = {edge + step for edge in EDGES for step in (-1, 0, 1)} | {1, longest}
    return [
        prompt
        for number, prompt in enumerate((*prompts, *grown))
        if number % every == 0 or len(prompt) in kept
    ]


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
    """What one engine alone answers, by prompt and number of tokens; each is asked once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._answers: dict[tuple[Prompt, int], Answer] = {}

    def ask(self, prompts: Iterable[Prompt], num_tokens: int = MAX_TOKENS) -> None:
        """Ask for what is not known yet, four prompts at a time."""
        new = {(prompt, num_tokens): None for prompt in prompts}.keys() - self._answers.keys()
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda key: self._client.complete(*key), new)
            self._answers.update(zip(new, answers, strict=True))

    def answer(self, prompt: Prompt, num_tokens: int = MAX_TOKENS) -> Answer:
        """The right answer of ``num_tokens`` tokens."""
        key = prompt, num_tokens
        if key not in self._answers:
            self._answers[key] = self._client.complete(*key)
        return self._answers[key]

    def __getitem__(self, prompt: Prompt) -> Answer:
        return self.answer(prompt)

    def mismatches(
        self, answers: Mapping[Prompt, Answer], num_tokens: int = MAX_TOKENS
    ) -> list[str]:
        """How ``answers`` differ from the right ones, a line per wrong one."""
        self.ask(answers, num_tokens)
        differences = (
            (prompt, compare(self.answer(prompt, num_tokens), seen))
            for prompt, seen in answers.items()
        )
        return [f"{len(prompt)} tokens: {found}" for prompt, found in differences if found]


def transfer_config(role: str, **extra: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` of a test engine; ``extra`` are our own keys."""
    policy = extra.pop("policy", "fail")
    return {
        "kv_connector": "PdconnConnector",
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
    others: Mapping[str, Engine]

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

    def has_logged(self, text: str, seconds: float = 20.0) -> bool:
        """Whether decode has logged ``text``, which it may do a little after it answered."""
        give_up = time.monotonic() + seconds
        while text not in self.decode_engine.log.read_text(encoding="utf-8"):
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
    *,
    ranks: int = 1,
    **extra: Any,
) -> EngineSpec:
    """One engine of a pair; ``extra`` goes into our part of the configuration."""
    port, side = free_ports(2)
    cores = os.cpu_count() or 1
    producer = role != "kv_consumer"
    in_one = configuration.one_process and ranks == 1
    bound = cores > 1 and ranks == 1 and not in_one
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
        tensor_parallel=ranks,
        one_process=in_one,
        cpus=(core % cores,) if bound else None,
        kv_cache_mib=KV_CACHE_MIB,
        num_blocks=None if producer else configuration.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
        env={
            "VLLM_SERVER_DEV_MODE": "1",  # for resets of its cache
            # Beside a pair with a worker of its own in each, two cores have little to spin with.
            **({} if in_one else {"PDCONN_PATIENT_READERS": "1"}),
        },
        args=("--enable-prompt-tokens-details",),
    )


def secret_beside(model: Path) -> Path:
    """A file with a secret that all engines of a model share."""
    path = model.with_suffix(".secret")
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32), encoding="utf-8")
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
    **extra: Any,
) -> Iterator[PdPair]:
    """Start a pair, with ``others`` beside it; ``extra`` are keys of ours for both engines."""
    lending = engine("prefill", model, configuration, "kv_producer", 0, **extra)
    known = [f"{lending.host}:{lending.side_channel_port}"] if configuration.warms else []
    others = others or {}
    specs = [
        lending,
        engine("decode", model, configuration, "kv_consumer", 1, warm_peers=known, **extra),
        *others.values(),
    ]
    with running(specs, directory, cache=cache_beside(model)) as (prefill, decode, *rest):
        pair = PdPair(configuration, prefill, decode, dict(zip(others, rest, strict=True)))
        yield pair
        # Leases that a test left end by themselves.
        assert pair.lent_after_one_more(seconds=2 * LEASE_S) == 0.0
        for each in (decode, *rest):
            assert pair.used(Client(each.url)) == 0.0
    ends = {each.spec.name: each.stop() for each in (prefill, decode, *rest)}
    assert {name: end and end.killed for name, end in ends.items()} == dict.fromkeys(ends, ())


@contextmanager
def alone(model: Path, directory: Path, beside: EngineSpec) -> Iterator[tuple[Engine, Engine]]:
    """An engine without a connector, and one that is launched with it and not waited for."""
    spec = EngineSpec(
        name="alone",
        model=model,
        port=free_ports(1)[0],
        one_process=True,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
        kv_cache_mib=512,
    )
    cache = cache_beside(model)
    # As users start it, and so with another seed of ``hash()`` than its pairs; meanwhile the
    # process that all others are forked from imports vLLM.
    reference = Engine(spec, directory, cache=cache)
    failing = Engine(beside, directory, cache=cache, start=ForkedProcess)
    try:
        reference.launch()
        failing.launch()
        wait_ready([reference])
        yield reference, failing
    finally:
        stop_all([reference, failing])
