"""Aborts and kills amid hand-overs of one family: three engines, and what is done to them.

Decode's reads are late and over TCP, so that aborts and kills come while they run and a killed
prefill engine takes what it lent along.  A failed pull is computed by decode.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdconn.lab.client import Client, prefill_only
from pdconn.lab.compare import Answer, make_prompts
from pdconn.lab.engine import Engine, running, wait_ready
from tests.vllm.engines.engines import PdPair, cache_beside
from tests.vllm.engines.families.handover import NUM_TOKENS, Handover, Prompt, engine
from tests.vllm.engines.families.models import Family

DELAY_S = 1.5
"""How late reads are posted, so that aborts and kills come while pulls run."""
LENGTHS = (90, 200, 700)
"""Prompts of several blocks."""


@dataclass(frozen=True)
class Faulty:
    """The engines, and the process to kill."""

    made: Handover
    prefill: Engine

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
        prefill, decode = self.made.clients["prefill"], self.made.clients["decode"]

        def hand_over(prompt: Prompt) -> Answer:
            ticket = prefill_only(prefill, prompt)
            return decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)

        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(hand_over, asked))


@contextmanager
def faulty_engines(family: Family, work: Path, *, prefix_caching: bool) -> Iterator[Faulty]:
    """Start an engine alone, and a pair whose reads are late."""
    model = family.write(work / "model")
    caching = {"prefix_caching": prefix_caching}
    late = {"reads": {"delay": 1.0, "delay_s": DELAY_S}}
    decode = engine("decode", family, model, "kv_consumer", debug_faults=late, **caching)
    recompute = {**(decode.kv_transfer_config or {}), "kv_load_failure_policy": "recompute"}
    specs = [
        engine("alone", family, model, None),
        engine("prefill", family, model, "kv_producer", **caching),
        replace(decode, kv_transfer_config=recompute, env={**decode.env, "UCX_TLS": "tcp"}),
    ]
    with running(specs, work, cache=cache_beside(model)) as started:
        clients = {each.spec.name: Client(each.url) for each in started}
        yield Faulty(Handover(family, clients), started[1])


def abort_pulls(faulty: Faulty, seed: int, count: int) -> None:
    """Leave while reads are late: later answers are right, and no block is lost."""
    made = faulty.made
    prompts = make_prompts(LENGTHS * count, seed)
    decode, prefill = made.clients["decode"], made.clients["prefill"]
    impatient = Client(decode.url, timeout_s=DELAY_S / 3)
    right = faulty.undisturbed(prompts)
    pulled = made.metric("pulls_total")

    def abort(prompt: Prompt) -> None:
        ticket = prefill_only(prefill, prompt)
        with pytest.raises(TimeoutError):
            impatient.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)

    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(abort, [made.expected(prompt)[0] for prompt in prompts]))
    assert made.metric("pulls_total") == pulled, "they left before their reads were posted"
    wrong = made.wrong(prompts, faulty.answers(prompts), right)
    assert wrong == [], wrong
    assert PdPair.used(decode, 30.0) == 0.0
    assert PdPair.used(prefill, 40.0) == 0.0


def kill_prefill(faulty: Faulty, seed: int, count: int) -> None:
    """Some of its tickets are being read, others were not claimed yet; then it starts again."""
    made = faulty.made
    prompts = make_prompts(LENGTHS * count, seed)
    later = make_prompts([65, 300], seed + 1)
    right, right_later = faulty.undisturbed(prompts), faulty.undisturbed(later)
    asked = [made.expected(prompt)[0] for prompt in prompts]
    decode, prefill = made.clients["decode"], made.clients["prefill"]
    tickets = [prefill_only(prefill, prompt) for prompt in asked]
    pulled = made.metric("pulls_total")
    pairs = list(zip(asked, tickets, strict=True))
    reading = min(len(pairs) // 2, faulty.at_once)
    with ThreadPoolExecutor(len(asked)) as pool:
        first = [
            pool.submit(decode.complete, prompt, NUM_TOKENS, kv_transfer_params=ticket)
            for prompt, ticket in pairs[:reading]
        ]
        time.sleep(DELAY_S / 3)  # claims are granted, reads wait
        faulty.prefill.kill()
        rest = [
            decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
            for prompt, ticket in pairs[reading:]
        ]
        seen = [each.result() for each in first] + rest
    wrong = made.wrong(prompts, seen, right)
    assert wrong == [], wrong
    assert made.metric("pulls_total") - pulled < len(asked)  # the others were computed
    faulty.prefill.launch()
    wait_ready([faulty.prefill])
    pulled = made.metric("pulls_total")
    wrong = made.wrong(later, faulty.answers(later), right_later)
    assert wrong == [], wrong
    assert made.metric("pulls_total") - pulled == 2
    assert PdPair.used(decode, 30.0) == 0.0
