"""Drawn requests at a decode engine with a store and tickets, all at once: right, or refused.

Beside them rows are removed, damaged and made to hang, blocks are so few that requests are
preempted, sessions are kept, clients leave, and the prefill engine is killed and started again.
vLLM's policy is its default, under which a request with a ticket that fails is refused.
``PDCONN_DRAWN_S`` and ``PDCONN_DRAWN_SEED`` draw for longer, and otherwise.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.lab.engine import Engine, wait_ready
from pdconn.tools.lab.lab_client import Client, lend_prefix, prefill_only
from pdconn.tools.lab.lab_errors import RequestRefused
from tests.forked.engines import running
from tests.vllm.engines.engines import (
    LEASE_S,
    Configuration,
    Expected,
    PdPair,
    Prompt,
    cache_beside,
    engine,
)
from tests.vllm.engines.store.stores import (
    NUM_TOKENS,
    TOKENS,
    asked,
    hangs,
    prompts,
    rows,
    store_engine,
    wait_for_rows,
)
from tests.vllm.engines.test_requests import leave

pytestmark = pytest.mark.matrix

SECONDS = float(os.environ.get("PDCONN_DRAWN_S", "25"))
SEED = int(os.environ.get("PDCONN_DRAWN_SEED", "1"))
CLIENTS = 8
ANSWER = 40
"""More than a block, so that requests outgrow what they were admitted with, and are preempted."""
STAGING_ROWS = 14
"""Rows for which there is room in staging: one prompt's, or those of a few short ones."""
UNAVAILABLE = (OSError, HTTPException, RequestRefused)
"""What a client sees of an engine that is being started again, and of a refused request."""


@dataclass
class Drawn:
    """A lender, an engine that pulls from it and loads, and what came of requests."""

    prefill: Engine
    decode: Client
    root: Path
    family: list[Prompt]
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    until: float = 0.0

    @property
    def lends(self) -> Client:
        """A client to the lender."""
        return Client(self.prefill.url, 60.0)

    def ticket(self, draw: random.Random, prompt: Prompt) -> Mapping[str, Any] | None:
        """A ticket for all of a prompt, for a prefix of it, or none."""
        kind = draw.choice(("whole", "whole", "prefix", "none"))
        if kind == "none":
            return None
        if kind == "whole":
            return prefill_only(self.lends, prompt)
        told = lend_prefix(self.lends, prompt, draw.randrange(1, len(prompt)))
        held = (told or {}).get("pdconn", {}).get("held")
        if held:
            told = lend_prefix(self.lends, prompt, held)
        return {"pdconn": {"from": told}} if told and "remote_engine_id" in told else None

    def ask(self, draw: random.Random, expected: Expected) -> None:
        """One drawn request."""
        prompt = draw.choice(self.family)
        try:
            params = self.ticket(draw, prompt)
        except UNAVAILABLE:
            self.seen["prefill is away"] += 1
            time.sleep(0.2)
            return
        if draw.random() < 0.1:
            leave(self.decode, prompt, draw.choice((0.0, 0.01, 0.05, 0.3)))
            return
        if draw.random() < 0.3:
            order = {"session": str(draw.randrange(9)), "seconds": draw.choice((0, 1, 30))}
            ours = {**(params or {}).get("pdconn", {}), "keep": order}
            params = {**(params or {}), "pdconn": ours}
        try:
            answer = self.decode.complete(prompt, ANSWER, kv_transfer_params=params)
        except UNAVAILABLE:
            is_whole = params is not None and "remote_engine_id" in params
            self.seen["refused" if is_whole else "refused without a ticket"] += 1
            return
        self.seen["answered"] += 1
        self.wrong += expected.mismatches({prompt: answer}, ANSWER)

    def client(self, number: int, expected: Expected) -> None:
        """Ask, one request after another."""
        draw = random.Random(SEED * 1000 + number)
        while time.monotonic() < self.until:
            self.ask(draw, expected)

    def harm(self) -> None:
        """Remove and damage rows, and have some hang for a while."""
        draw = random.Random(SEED)
        while time.monotonic() < self.until:
            time.sleep(0.05)
            with suppress(OSError):  # it is evicted meanwhile
                found = rows(self.root, "fa") + rows(self.root, "wa")
                if found:
                    self.harm_row(draw, draw.choice(found))

    def harm_row(self, draw: random.Random, path: Path) -> None:
        """Remove or damage a row, or have it and others of its number hang for a while."""
        match draw.choice(("remove", "damage", "hang")):
            case "remove":
                path.unlink()
            case "damage":
                with path.open("r+b") as file:
                    file.seek(draw.randrange(path.stat().st_size))
                    file.write(b"\x5a" * 9)
            case _:
                hanging = hangs(self.root)
                hanging.write_text(str(draw.randrange(10)))
                time.sleep(0.3)
                hanging.unlink()
        self.seen["harmed"] += 1

    def restart(self) -> None:
        """Kill the lender now and then, and start it again."""
        while time.monotonic() < self.until - SECONDS / 4:
            time.sleep(SECONDS / 4)
            self.prefill.kill_command()
            self.prefill.launch()
            wait_ready([self.prefill])
            self.seen["restarted"] += 1


def family() -> list[Prompt]:
    """Prompts that share beginnings, within blocks and at their ends."""
    bases, tails = prompts(71, (1500, 1200, 900)), prompts(72, (40, 100, 130, 300, 65))
    cuts = random.Random(73)
    found = list(bases)
    for base in bases:
        for tail in tails:
            cut = cuts.choice((len(base), cuts.randrange(1, len(base)), TOKENS * 5 + 7))
            found.append((base[:cut] + tail)[:1900])
    return found


@pytest.fixture(scope="module")
def drawn(model: Path, work: Path, expected: Expected) -> Iterator[Drawn]:
    wanted = family()
    expected.ask(wanted, ANSWER)
    root = work / "drawn"
    few = Configuration("LBHNC", True, one_process=True, policy="fail")
    loads = store_engine(
        "loads", model, root, connector="HangingReads", role="kv_both", beside="always",
        capacity="48MiB", staging=f"{STAGING_ROWS * 128}KiB",
    )  # fmt: skip
    specs = [engine("lends", model, few, "kv_both", 0), replace(loads, num_blocks=230)]
    with running(specs, work / "drawn-engines", cache=cache_beside(model)) as (lends, decode):
        yield Drawn(lends, Client(decode.url, 90.0), root, wanted)


def test_all_at_once(drawn: Drawn, expected: Expected) -> None:
    before = drawn.decode.metrics()
    drawn.until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        jobs = [pool.submit(drawn.client, number, expected) for number in range(CLIENTS)]
        jobs.append(pool.submit(drawn.harm))
        restarting = threading.Thread(target=drawn.restart)
        restarting.start()
        for job in jobs:
            job.result(SECONDS + 120.0)
        restarting.join(120.0)
    after = drawn.decode.metrics()
    counted = {
        name: after[f"pdconn:store_{name}_total"] - before[f"pdconn:store_{name}_total"]
        for name in ("beside", "beside_missed_tokens", "hits")
    }
    counted["preempted"] = after["vllm:num_preemptions_total"]
    print(dict(drawn.seen), counted)
    assert drawn.wrong == []
    assert drawn.seen["answered"] > 50
    assert drawn.seen["refused without a ticket"] == 0
    assert min(counted.values()) > 0, counted
    assert drawn.seen["restarted"] >= 2


def test_nothing_is_left_over(drawn: Drawn, expected: Expected) -> None:
    """Blocks, leases, and room in staging: a load of all of it still finds it."""
    asked(drawn.decode, [(5, 6, 7)])
    for client in (drawn.lends, drawn.decode):
        assert PdPair.used(client, 2 * LEASE_S + 30.0) == 0.0
    [prompt] = prompts(74, (13 * TOKENS + 1,))
    before = drawn.decode.metrics()
    ticket = prefill_only(drawn.lends, prompt)
    asked(drawn.decode, [prompt[: 13 * TOKENS]])
    wait_for_rows(drawn.root, 13)
    answer = drawn.decode.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
    assert expected.mismatches({prompt: answer}) == []
    after = drawn.decode.metrics()
    name = "pdconn:store_beside_tokens_total"
    assert after[name] - before[name] == 13 * TOKENS
