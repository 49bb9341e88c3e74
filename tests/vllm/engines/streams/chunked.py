"""A pair whose prompts take many steps, so that decode hears of blocks before the last one.

::

    prefill   256 tokens a step, and few blocks: prompts of 4000 tokens take 16 steps
    decode    fails what fails; but a request with a stream is computed
    beside    lends and follows: the other engine of requests beside a kill
    wide      decodes with two ranks

Prefill and decode are mortal (:mod:`tests.vllm.engines.streams.points`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from pdconn.protocol.early import EarlyTicket
from pdconn.router.openai.bodies import lend_params
from pdconn.tools.lab.compare_answers import Answer, compare
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.lab_errors import RequestRefused
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import BLOCK, PdPair, Prompt, cache_beside, transfer_config
from tests.vllm.engines.streams.points import DIES_AT, file_of

STEP_TOKENS = 256
LONG = 4000
MAX_MODEL_LEN = 4352
NUM_TOKENS = 6
NUM_BLOCKS = 300
"""Of prefill: two of the longest prompts, and some."""
LEASE_S = 3.0
HANGS_UP = (OSError, HTTPException, RequestRefused)
"""What the client of an engine that is killed, or refuses, sees."""


@dataclass(frozen=True)
class Chunked:
    """The engines, and what one engine alone answers."""

    engines: Mapping[str, Engine]
    work: Path

    def client(self, name: str, timeout_s: float = 120.0) -> Client:
        return Client(self.engines[name].url, timeout_s=timeout_s)

    def metric(self, name: str, engine: str) -> float:
        """A counter, as of the engine's last step."""
        client = self.client(engine)
        client.complete((5, 6, 7), 1)
        return client.metrics().get(name, 0.0)

    def like(self, decode: str = "decode", prefill: str = "prefill") -> Mapping[str, Any]:
        """A ticket of prefill, which says where it lends; used up."""
        prompt = tuple(range(50, 120))
        ticket = prefill_only(self.client(prefill), prompt)
        assert ticket is not None
        self.client(decode).complete(prompt, 1, kv_transfer_params=ticket)
        return ticket

    def wrong(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[str]:
        """How answers differ from those of one engine alone, a line per wrong one."""
        alone = self.client("alone")
        with ThreadPoolExecutor(4) as pool:
            right = list(pool.map(lambda prompt: alone.complete(prompt, NUM_TOKENS), prompts))
        found = zip(prompts, map(compare, right, answers), strict=True)
        return [f"{len(prompt)} tokens: {problem}" for prompt, problem in found if problem]

    def used(self, *names: str) -> dict[str, float]:
        """Engines that have blocks in use once every lease must have ended."""
        found = {name: PdPair.used(self.client(name), 3 * LEASE_S) for name in names}
        return {name: used for name, used in found.items() if used}


@dataclass(frozen=True)
class Legs:
    """The two legs of a request, which were asked at once."""

    prefill: Future[Any]
    decode: Future[Answer]


def ask_legs(
    pool: ThreadPoolExecutor,
    engines: Chunked,
    prompt: Prompt,
    like: Mapping[str, Any],
    *,
    prefill: str = "prefill",
    decode: str = "decode",
    leaves_s: tuple[float, float] = (120.0, 120.0),
    head_start_s: float = 0.0,
) -> Legs:
    """Ask both engines at once; the clients of prefill and decode leave after ``leaves_s``.

    A leg whose client has left, or whose engine was killed, ends with one of ``HANGS_UP``.

    Args:
        head_start_s: of decode before prefill.
    """
    early = EarlyTicket.like(like, secrets.token_hex(16))
    lending = {**lend_params(), "pdconn": {"stream": early.stream}}
    first, second = engines.client(prefill, leaves_s[0]), engines.client(decode, leaves_s[1])

    def lend() -> Answer:
        time.sleep(head_start_s)
        return first.complete(prompt, 1, kv_transfer_params=lending)

    return Legs(
        pool.submit(lend),
        pool.submit(second.complete, prompt, NUM_TOKENS, kv_transfer_params=early.to_params()),
    )


def answers_of(
    engines: Chunked, prompts: Sequence[Prompt], like: Mapping[str, Any], decode: str = "decode"
) -> list[Answer]:
    """Decode's answers to prompts that prefill computes meanwhile, all at once."""
    with ThreadPoolExecutor(2 * len(prompts)) as pool:
        asked = [ask_legs(pool, engines, prompt, like, decode=decode) for prompt in prompts]
        for legs in asked:
            assert legs.prefill.result().kv_transfer_params is not None
        return [legs.decode.result() for legs in asked]


def ends(future: Future[Any]) -> Answer | BaseException:
    """What came of a leg."""
    error = future.exception()
    if error is None:
        answer: Answer = future.result()
        return answer
    if not isinstance(error, HANGS_UP):
        raise error
    return error


@contextmanager
def chunked(model: Path, work: Path, *, caches: bool) -> Iterator[Chunked]:
    """Start the engines; at the end none has blocks in use.

    Args:
        caches: whether they have prefix caching; then ``wide`` runs in place of ``beside``.
    """
    ports = iter(free_ports(6))
    plain = EngineSpec(
        name="alone",
        model=model,
        port=next(ports),
        one_process=True,
        prefix_caching=caches,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
    )
    lease = {"kv_lease_duration": LEASE_S, "verify": "always"}
    consumer = transfer_config("kv_consumer", verify="always")
    prefill = replace(
        plain,
        name="prefill",
        port=next(ports),
        side_channel_port=next(ports),
        kv_transfer_config=transfer_config("kv_producer", **lease),
        num_blocks=NUM_BLOCKS,
        args=("--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", "64"),
    )
    decode = replace(plain, name="decode", port=next(ports), kv_transfer_config=consumer)
    if caches:
        third = replace(decode, name="wide", tensor_parallel=2, one_process=False)
    else:
        both = transfer_config("kv_both", **lease)
        third = replace(
            prefill, name="beside", side_channel_port=next(ports), kv_transfer_config=both
        )
    third = replace(third, port=next(ports))
    work.mkdir()
    specs = [plain, mortal(prefill, work), mortal(decode, work), third]
    with running(specs, work, cache=cache_beside(model)) as started:
        made = Chunked({each.spec.name: each for each in started}, work)
        yield made
        assert made.used(*made.engines) == {}


def mortal(spec: EngineSpec, work: Path) -> EngineSpec:
    """The same engine, which dies where it is asked to."""
    connector = {
        "kv_connector": "Mortal",
        "kv_connector_module_path": "tests.vllm.engines.streams.mortal",
    }
    path = file_of(work, spec.name)
    return replace(
        spec,
        kv_transfer_config={**(spec.kv_transfer_config or {}), **connector},
        env={**spec.env, DIES_AT: str(path)},
    )


def await_streams(engines: Chunked, count: float, seconds: float = 20.0) -> None:
    """Until prefill has opened ``count`` streams since its start.

    Raises:
        TimeoutError: it has not.
    """
    give_up = time.monotonic() + seconds
    while engines.client("prefill").metrics().get("pdconn:streams_total", 0.0) < count:
        if time.monotonic() > give_up:
            raise TimeoutError(f"fewer than {count} streams")
        time.sleep(0.01)
