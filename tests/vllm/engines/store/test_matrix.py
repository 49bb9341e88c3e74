"""Stores between engines of other topologies and layouts, beside tickets, and in other models.

Engines start together, once for all laws that they can serve: ``fleet`` over one root, ``pair``
over another, and the gpt-oss-like model's over a third.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import Answer, compare
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client, prefill_only, prefill_then_decode
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import BLOCK, MAX_MODEL_LEN, Expected, Prompt, cache_beside
from tests.vllm.engines.families.models import GPT_OSS
from tests.vllm.engines.store.stores import (
    NUM_TOKENS,
    TOKENS,
    asked,
    breaks,
    hit_tokens,
    load_failures,
    num_rows,
    prompts,
    resumable,
    rows,
    store_engine,
    wait_for_rows,
)

pytestmark = pytest.mark.matrix

FEW_BLOCKS = 200
"""Of 32 tokens; a prompt of 1500 tokens takes 141 of them while it is computed."""


@dataclass
class Fleet:
    """Engines by name over one root."""

    engines: dict[str, Engine]
    root: Path

    def __getitem__(self, name: str) -> Client:
        return Client(self.engines[name].url)

    def hits(self) -> dict[str, int]:
        """Tokens loaded so far, by engine."""
        return {name: hit_tokens(self[name]) for name in self.engines}

    def saved(self) -> int:
        """FA rows committed."""
        return len(rows(self.root, "fa"))


@contextmanager
def _fleet(specs: list[EngineSpec], root: Path, directory: Path, model: Path) -> Iterator[Fleet]:
    with running(specs, directory, cache=cache_beside(model), timeout_s=600) as engines:
        yield Fleet({engine.spec.name: engine for engine in engines}, root)


# One model, one root, other engines


@pytest.fixture(scope="module")
def fleet(model: Path, work: Path, expected: Expected) -> Iterator[Fleet]:
    """One rank, two ranks, one that saves answers too, one of few blocks with a prefix cache."""
    del expected  # its engine starts first
    root = work / "fleet-store"
    few = store_engine("few", model, root, layout="LBHNC", caching=True)
    specs = [
        store_engine("one", model, root, layout="BHLNC"),
        store_engine("two", model, root, layout="LBHNC", ranks=2, connector="BreakableLoads"),
        store_engine("all", model, root, layout="BLHNC", save="all", window_every="all"),
        replace(few, num_blocks=FEW_BLOCKS),
    ]
    with _fleet(specs, root, work / "fleet", model) as started:
        yield started


def test_one_rank_two_ranks_and_one_rank_go_on_where_the_other_ended(
    fleet: Fleet, expected: Expected
) -> None:
    """Layouts are BHLNC, LBHNC and BLHNC; each engine adds to what it loaded."""
    first, second, third = prompts(41, (4 * TOKENS + 9, 3 * TOKENS, 300))
    turns = {"one": first, "two": first + second, "all": first + second + third}
    loaded, saved = 0, fleet.saved()
    for name, prompt in turns.items():
        before = hit_tokens(fleet[name])
        assert not expected.mismatches(asked(fleet[name], [prompt])), name
        assert hit_tokens(fleet[name]) - before == loaded, name
        wait_for_rows(fleet.root, saved + num_rows([prompt]))
        loaded = resumable(prompt)
    counts = fleet.hits()
    for name in ("one", "two"):  # what three engines saved is one prompt's
        assert not expected.mismatches(asked(fleet[name], [turns["all"]])), name
        assert hit_tokens(fleet[name]) - counts[name] == loaded, name


def test_two_engines_at_once_save_every_row_once_and_load_each_others(
    fleet: Fleet, expected: Expected
) -> None:
    names = ("one", "two")
    shared, *own = prompts(42, (700, 500, 400, 900, 130))
    wanted = {name: [shared, *own[at::2]] for at, name in enumerate(names)}
    saved = fleet.saved()
    expected.ask([shared, *own])
    with ThreadPoolExecutor(8) as pool:
        told = {
            (name, prompt): pool.submit(fleet[name].complete, prompt, NUM_TOKENS)
            for name in names
            for prompt in wanted[name]
        }
    for (name, prompt), answer in told.items():
        assert compare(expected[prompt], answer.result()) is None, (name, len(prompt))
    wait_for_rows(fleet.root, saved + num_rows([shared, *own]))
    before = fleet.hits()
    for name, other in zip(names, names[::-1], strict=True):
        assert not expected.mismatches(asked(fleet[name], wanted[other]))
        assert hit_tokens(fleet[name]) - before[name] == sum(map(resumable, wanted[other]))


def test_a_second_turn_loads_the_rows_of_the_answer(fleet: Fleet, expected: Expected) -> None:
    """Only where ``save`` is ``all``; otherwise it loads the first prompt's."""
    num_tokens = 200
    for name, seed in (("all", 43), ("one", 44)):
        prompt, more = prompts(seed, (3 * TOKENS + 20, 60))
        saved = fleet.saved()
        answer = fleet[name].complete(prompt, num_tokens)
        assert compare(expected.answer(prompt, num_tokens), answer) is None
        kept = prompt + answer.tokens[:-1] if name == "all" else prompt
        wait_for_rows(fleet.root, saved + num_rows([kept]))
        before = hit_tokens(fleet[name])
        second = prompt + answer.tokens + more
        assert not expected.mismatches(asked(fleet[name], [second]))
        assert hit_tokens(fleet[name]) - before == num_rows([kept]) * TOKENS, name


def test_what_an_engine_holds_itself_is_not_loaded(fleet: Fleet, expected: Expected) -> None:
    [prompt] = prompts(45, (8 * TOKENS + 1,))
    saved = fleet.saved()
    asked(fleet["one"], [prompt])
    wait_for_rows(fleet.root, saved + num_rows([prompt]))
    few, held = fleet["few"], 2 * TOKENS + BLOCK
    assert not expected.mismatches(asked(few, [prompt[: held + 1]]))
    before, local = hit_tokens(few), _local_tokens(few)
    assert not expected.mismatches(asked(few, [prompt]))
    assert _local_tokens(few) - local == held
    assert hit_tokens(few) - before == resumable(prompt) - held


def test_two_ranks_pull_with_a_ticket_and_load_when_it_is_consumed(
    fleet: Fleet, expected: Expected
) -> None:
    """Both ranks are refused the second time, before anything is promised: nothing fails."""
    [prompt] = prompts(48, (5 * TOKENS + 7,))
    saved, two = fleet.saved(), fleet["two"]
    ticket = prefill_only(fleet["one"], prompt)
    assert ticket
    wait_for_rows(fleet.root, saved + num_rows([prompt]))
    for stored, gone in ((0, 0), (resumable(prompt), 1)):
        before = _stored_tokens(two)
        answer = two.complete(prompt, NUM_TOKENS, kv_transfer_params=ticket)
        assert not expected.mismatches({prompt: answer})
        assert _stored_tokens(two) - before == stored
        assert two.metrics().get("pdconn:tickets_gone_total", 0) == gone
    assert two.metrics()["pdconn:pulls_total"] == 2, "one of each rank"


def test_a_load_that_fails_on_one_of_two_ranks_is_computed(
    fleet: Fleet, expected: Expected
) -> None:
    """The other rank's is right; the policy is vLLM's default."""
    [prompt] = prompts(49, (5 * TOKENS + 1,))
    saved, two = fleet.saved(), fleet["two"]
    asked(fleet["one"], [prompt])
    wait_for_rows(fleet.root, saved + num_rows([prompt]))
    failures = load_failures(two)
    breaks(fleet.root).touch()
    assert not expected.mismatches(asked(two, [prompt]))
    assert not breaks(fleet.root).exists(), "a load was begun"
    assert load_failures(two) - failures == 1
    before = hit_tokens(two)
    assert not expected.mismatches(asked(two, [prompt]))
    assert hit_tokens(two) - before == resumable(prompt)
    assert load_failures(two) - failures == 1


def test_few_blocks_are_filled_from_the_store_again_and_again(
    fleet: Fleet, expected: Expected
) -> None:
    """Prompts of common beginnings, several at once, and more than its blocks hold."""
    few = fleet["few"]
    stems, tails = prompts(46, (900, 700, 500)), prompts(47, (300, 250, 140, 90, 33))
    wanted = [stem[: len(stem) - 100 * n] + tail for stem in stems for n, tail in enumerate(tails)]
    expected.ask(wanted)
    before, local = hit_tokens(few), _local_tokens(few)
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            for answers in pool.map(lambda prompt: [asked(few, [prompt]) for _ in "12"], wanted):
                assert not any(map(expected.mismatches, answers))
    assert hit_tokens(few) > before
    assert _local_tokens(few) > local
    assert few.metrics()["vllm:kv_cache_usage_perc"] == 0.0 or _settles(few)


def _settles(client: Client) -> bool:
    """Whether no block stays pinned once everything is saved."""
    for _ in range(50):
        client.complete((5, 6, 7), 1)
        if client.metrics()["vllm:kv_cache_usage_perc"] == 0.0:
            return True
    return False


def _local_tokens(client: Client) -> int:
    return int(client.metrics().get("vllm:prefix_cache_hits_total", 0))


# Beside tickets


@pytest.fixture(scope="module")
def pair(model: Path, work: Path, expected: Expected) -> Iterator[Fleet]:
    """Prefill and decode, each with the store."""
    del expected
    root = work / "pair-store"
    specs = [
        store_engine("prefill", model, root, layout="BHLNC", role="kv_producer"),
        store_engine("decode", model, root, layout="LBHNC", role="kv_consumer"),
        store_engine("recomputing", model, root, role="kv_consumer", policy="recompute"),
    ]
    with _fleet(specs, root, work / "store-pair", model) as started:
        yield started


def test_prefill_and_decode_use_the_store_beside_tickets(pair: Fleet, expected: Expected) -> None:
    first, tail, other, late = prompts(51, (5 * TOKENS + 3, 200, 900, 400))
    through = prefill_then_decode
    seen: dict[Prompt, Answer] = {
        prompt: through(pair["prefill"], pair["decode"], prompt, NUM_TOKENS)
        for prompt in (first, other)
    }
    assert not expected.mismatches(seen)
    pulled = {"decode": len(first) + len(other) - 2, "recomputing": 0}
    assert pair.hits() == {"prefill": 0, **pulled}, "both were pulled"
    wait_for_rows(pair.root, num_rows([first, other]))

    # Its prefix is not computed again by prefill, and decode pulls.
    second = first + tail
    answer = through(pair["prefill"], pair["decode"], second, NUM_TOKENS)
    assert compare(expected[second], answer) is None
    pulled["decode"] += len(second) - 1
    assert pair.hits() == {"prefill": resumable(first), **pulled}
    wait_for_rows(pair.root, num_rows([second, other]))

    # What is stored is pulled, and not saved again.
    written = _rows_written(pair["decode"])
    answer = through(pair["prefill"], pair["decode"], other, NUM_TOKENS)
    assert compare(expected[other], answer) is None
    pulled["decode"] += len(other) - 1
    assert pair.hits() == {"prefill": resumable(first) + resumable(other), **pulled}
    assert _rows_written(pair["decode"]) == written

    # Without a ticket decode loads.
    assert not expected.mismatches(asked(pair["decode"], [second]))
    assert hit_tokens(pair["decode"]) - pulled["decode"] == resumable(second)

    # Prefill dies: what it saved is there, also for tickets of blocks that are gone.
    tickets = {prompt: prefill_only(pair["prefill"], prompt) for prompt in (other, late)}
    assert all(tickets.values())
    wait_for_rows(pair.root, num_rows([second, other, late]))
    pair.engines[
        "prefill"
    ].kill_command()  # under vLLM's default policy, a pull that fails would show
    for prompt in (first, other, late):
        for decode in (pair["decode"], pair["recomputing"]):
            before = _stored_tokens(decode)
            answer = decode.complete(prompt, NUM_TOKENS, kv_transfer_params=tickets.get(prompt))
            assert compare(expected[prompt], answer) is None, len(prompt)
            assert _stored_tokens(decode) - before == resumable(prompt), len(prompt)
    # With the policy to compute again, a ticket is promised unseen, and its pull fails.
    gone = "pdconn:tickets_gone_total"
    assert pair["decode"].metrics()[gone] == 2
    assert pair["recomputing"].metrics().get(gone, 0) == 0
    assert pair["recomputing"].metrics()["vllm:nixl_num_failed_transfers_total"] == 2


def _rows_written(client: Client) -> int:
    return int(client.metrics().get("pdconn:store_rows_written_total", 0))


def _stored_tokens(client: Client) -> int:
    """Tokens that the store gave, without those that were pulled."""
    return int(client.metrics().get("pdconn:store_hit_tokens_total", 0))


# A model like gpt-oss


def test_a_model_with_sinks_cold_warm_and_restarted_in_another_layout(
    work: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = GPT_OSS.write(tmp_path_factory.mktemp("gpt-oss") / "model")
    root, directory = work / "oss-store", work / "oss"
    alone = EngineSpec(
        name="alone", model=model, port=free_ports(1)[0], one_process=True,
        max_model_len=MAX_MODEL_LEN, block_tokens=BLOCK,
    )  # fmt: skip
    wanted = prompts(61, (TOKENS - 1, TOKENS, TOKENS + 1, 300, 700, 5 * TOKENS, 1500))
    tails = prompts(62, (60, 200))
    with _fleet(
        [alone, store_engine("cold", model, root, layout="BHLNC")], root, directory, model
    ) as first:
        expected = Expected(first["alone"])
        assert not expected.mismatches(asked(first["cold"], wanted))
        assert hit_tokens(first["cold"]) == 0
        wait_for_rows(root, num_rows(wanted))
        assert not expected.mismatches(asked(first["cold"], wanted))
        assert hit_tokens(first["cold"]) == sum(map(resumable, wanted))
        grown = [prompt + tail for prompt, tail in zip(wanted[-3:], tails, strict=False)]
        expected.ask(grown)
        assert len({expected[prompt].tokens for prompt in wanted}) == len(wanted)
    again = store_engine("again", model, root, layout="LBHNC")
    with _fleet([again], root, directory, model) as restarted:
        assert not expected.mismatches(asked(restarted["again"], wanted))
        loaded = sum(map(resumable, wanted))
        assert hit_tokens(restarted["again"]) == loaded
        assert not expected.mismatches(asked(restarted["again"], grown))
        assert hit_tokens(restarted["again"]) - loaded == num_rows(wanted[-3:-1]) * TOKENS
