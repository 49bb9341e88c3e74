"""Aborts and kills amid hand-overs of one family: three engines, and what is done to them.

Decode's reads are late and over TCP, so that aborts and kills come while they run and a killed
prefill engine takes what it lent along.  A failed pull is computed by decode.

A fourth engine can run beside them, which decodes as well and is wrong about faults: it shows
what the comparisons here notice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import Answer, make_prompts
from pdconn.tools.lab.engine import Engine, wait_ready
from pdconn.tools.lab.lab_client import Client, prefill_only
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import PdPair, cache_beside
from tests.vllm.engines.families.handover import NUM_TOKENS, Handover, Prompt, engine
from tests.vllm.engines.families.models import Family

DELAY_S = 1.5
"""How late reads are posted, so that aborts and kills come while pulls run."""
LENGTHS = (90, 200, 700)
"""Prompts of several blocks."""


@dataclass(frozen=True)
class Faulty:
    """The engines, the process to kill, and which engine decodes."""

    made: Handover
    prefill: Engine
    decode: str = "decode"

    @property
    def hasty(self) -> Faulty:
        """With the decode engine that takes every pull for received."""
        return replace(self, decode="hasty")

    @property
    def at_once(self) -> int:
        """Prompts computed at the same time; see :class:`Family` for one that is coarse."""
        return 1 if self.made.family.coarse else 8

    def undisturbed(self, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        """Answers before any fault, if the family needs them; see :class:`Family`."""
        return self.answers(prompts) if self.made.family.drifts else ()

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Hand over prompts, together if that may be, so that their delays pass together."""
        asked = [self.made.expected(prompt)[0] for prompt in prompts]
        prefill, decode = self.made.clients["prefill"], self.made.clients[self.decode]

        def hand_over(prompt: Prompt) -> Answer:
            ticket = prefill_only(prefill, prompt)
            return decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)

        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(hand_over, asked))

    def pulls(self) -> float:
        """Pulls that were received."""
        return self.made.metric("pulls_total", self.decode)


@contextmanager
def faulty_engines(
    family: Family, work: Path, *, prefix_caching: bool, hasty: bool = False
) -> Iterator[Faulty]:
    """Start an engine alone, and a pair whose reads are late; and ``hasty`` if it is asked for."""
    model = family.write(work / "model")
    caching = {"prefix_caching": prefix_caching}
    late = {"reads": {"delay": 1.0, "delay_s": DELAY_S}}

    def decoding(name: str, connector: str | None = None) -> EngineSpec:
        spec = engine(
            name, family, model, "kv_consumer", connector=connector, debug_faults=late, **caching
        )
        recompute = {**(spec.kv_transfer_config or {}), "kv_load_failure_policy": "recompute"}
        return replace(spec, kv_transfer_config=recompute, env={**spec.env, "UCX_TLS": "tcp"})

    specs = [
        engine("alone", family, model, None),
        engine("prefill", family, model, "kv_producer", **caching),
        decoding("decode"),
        *([decoding("hasty", "Hasty")] if hasty else []),
    ]
    with running(specs, work, cache=cache_beside(model)) as started:
        clients = {each.spec.name: Client(each.url) for each in started}
        yield Faulty(Handover(family, clients), started[1])


def wrong_after_aborts(
    faulty: Faulty, prompts: Sequence[Prompt], others: Sequence[Prompt]
) -> list[str]:
    """Leave while reads of ``prompts`` are late, and have decode compute ``others`` meanwhile.

    They are put into blocks that were given back, to which no read may write any more.  Each is
    computed again and again until all reads have come.
    """
    made = faulty.made
    decode, prefill = made.clients[faulty.decode], made.clients["prefill"]
    impatient = Client(decode.url, timeout_s=DELAY_S / 3)
    asked = [made.expected(prompt)[0] for prompt in prompts]
    beside = [made.expected(prompt)[0] for prompt in others]
    pulled = faulty.pulls()

    def abort(prompt: Prompt) -> None:
        ticket = prefill_only(prefill, prompt)
        with pytest.raises(TimeoutError):
            impatient.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)

    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(abort, asked))
    assert faulty.pulls() == pulled, "they left before their reads were posted"
    rounds, until = [], time.monotonic() + DELAY_S
    with ThreadPoolExecutor(faulty.at_once) as pool:
        while time.monotonic() < until:
            rounds.append(
                list(pool.map(lambda prompt: decode.complete(prompt, NUM_TOKENS), beside))
            )
    return [wrong for seen in rounds for wrong in made.wrong(others, seen)]


def abort_pulls(faulty: Faulty, seed: int, count: int) -> None:
    """Leave while reads are late: answers beside and later are right, and no block is lost."""
    made = faulty.made
    prompts, others = (make_prompts(LENGTHS * count, each) for each in (seed, seed + 10))
    right = faulty.undisturbed(prompts)
    wrong = wrong_after_aborts(faulty, prompts, others)
    assert wrong == [], wrong
    wrong = made.wrong(prompts, faulty.answers(prompts), right)
    assert wrong == [], wrong
    assert PdPair.used(made.clients[faulty.decode], 30.0) == 0.0
    assert PdPair.used(made.clients["prefill"], 40.0) == 0.0


def answers_amid_a_kill(faulty: Faulty, prompts: Sequence[Prompt]) -> list[Answer]:
    """Kill prefill when some of its tickets are being read and others were not claimed yet."""
    made = faulty.made
    asked = [made.expected(prompt)[0] for prompt in prompts]
    decode, prefill = made.clients[faulty.decode], made.clients["prefill"]
    tickets = [prefill_only(prefill, prompt) for prompt in asked]
    pairs = list(zip(asked, tickets, strict=True))
    reading = min(len(pairs) // 2, faulty.at_once)
    with ThreadPoolExecutor(len(asked)) as pool:
        first = [
            pool.submit(decode.complete, prompt, NUM_TOKENS, kv_transfer_params=ticket)
            for prompt, ticket in pairs[:reading]
        ]
        time.sleep(DELAY_S / 3)  # claims are granted, reads wait
        faulty.prefill.kill_command()
        if made.family.coarse:
            wait(first)  # computed beside others it would be rounded with them
        rest = [
            decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
            for prompt, ticket in pairs[reading:]
        ]
        return [each.result() for each in first] + rest


def kill_prefill(faulty: Faulty, seed: int, count: int) -> None:
    """What it lent is computed by decode, and it lends again when it was started again."""
    made = faulty.made
    prompts = make_prompts(LENGTHS * count, seed)
    later = make_prompts([65, 300], seed + 1)
    right, right_later = faulty.undisturbed(prompts), faulty.undisturbed(later)
    pulled = faulty.pulls()
    wrong = made.wrong(prompts, answers_amid_a_kill(faulty, prompts), right)
    assert wrong == [], wrong
    assert faulty.pulls() - pulled < len(prompts)  # the others were computed
    faulty.prefill.launch()
    wait_ready([faulty.prefill])
    pulled = faulty.pulls()
    wrong = made.wrong(later, faulty.answers(later), right_later)
    assert wrong == [], wrong
    assert faulty.pulls() - pulled == 2
    assert PdPair.used(made.clients[faulty.decode], 30.0) == 0.0
