"""Answers lent back: bounded, oldest given up first, used as far as the next prompt shares them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.protocol.errors import TicketError
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.prefix import ticket_from
from pdconn.protocol.ticket import MAX_CUTS, BlockList, Ticket, TicketCut, parse_ticket
from pdconn.tools.lab.ports import free_ports
from pdconn.vllm.config import ConfigError, read_settings
from pdconn.vllm.lends.answers import LendableAnswer, LentAnswers
from pdconn.vllm.lends.lending import Lending
from pdconn.vllm.lends.pins import LeaseKind
from pdconn.vllm.prompt import prefix_digest, prefix_digests
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulling import Pulling
from pdconn.vllm.values import LendBack
from tests.fakes.pair import Cache
from tests.fakes.simulated.block_pool import CountedPool
from tests.fakes.simulated.hooks import matched
from tests.vllm.lends.scheduler import settle
from tests.vllm.lends.test_prefixes import grant, request
from transport.testing.inprocess.faults import ManualClock

SAID = list(range(100, 164))
TURN = {"do_remote_decode": True}


# Digests and cuts


def test_a_digest_is_the_same_however_it_was_reached() -> None:
    rng = Random(1)
    for _ in range(50):
        tokens = [rng.randrange(1 << rng.choice((4, 8, 16, 30))) for _ in range(300)]
        ends = sorted({rng.randint(1, 300) for _ in range(9)})
        asked = request(tokens, {})
        assert prefix_digests(asked, ends) == [prefix_digest(asked, end) for end in ends]


def test_long_prompts_are_told_apart_in_every_piece() -> None:
    """Tokens are encoded by pieces of 32,768."""
    tokens = [7] * 100_000
    digest = prefix_digest(request(tokens, {}), 99_999)
    for changed in (0, 32_767, 32_768, 99_998):
        other = [*tokens[:changed], 8, *tokens[changed + 1 :]]
        assert prefix_digest(request(other, {}), 99_999) != digest
    assert prefix_digest(request([*tokens[:-1], 8], {}), 99_999) == digest


def ticket(ends: list[int], tokens: list[int] = SAID) -> Ticket:
    """For ``tokens``, and with cuts."""
    lent = request(tokens, {})
    *cuts, whole = prefix_digests(lent, [*ends, len(tokens)])
    made = tuple(map(TicketCut, ends, cuts))
    blocks = (BlockList(0, (1, 2, 3, 4)),)
    return Ticket("e", "boot", "r", "host", 1, len(tokens), whole, blocks, made)


def test_a_ticket_keeps_its_cuts_on_the_way() -> None:
    made = ticket([16, 32])
    assert parse_ticket(made.to_params(1, 1)) == made
    assert "cuts" not in ticket([]).to_params(1, 1)["pdconn"], "as it was without"


def test_a_changed_cut_is_another_ticket() -> None:
    made = ticket([16, 32])
    for cuts in (
        made.cuts[:1],
        (dataclasses.replace(made.cuts[0], num_tokens=17), made.cuts[1]),
        (dataclasses.replace(made.cuts[0], digest="other"), made.cuts[1]),
    ):
        assert dataclasses.replace(made, cuts=cuts).digest() != made.digest()


@pytest.mark.parametrize(
    "cuts",
    [
        7,
        {},
        [[16]],
        [[16, 7]],
        [["16", "d"]],
        [[True, "d"]],
        [[0, "d"]],
        [[-1, "d"]],
        [[64, "d"]],
        [[10**30, "d"]],
        [[32, "d"], [16, "d"]],
        [[16, "d"], [16, "d"]],
        [[16, ""]],
        [[16, "d" * 5000]],
        [[16, "\n"]],
        [[at + 1, "d"] for at in range(MAX_CUTS + 1)],
    ],
)
def test_wrong_cuts_are_refused_by_name(cuts: object) -> None:
    params = ticket([16]).to_params(1, 1)
    params["pdconn"]["cuts"] = cuts
    with pytest.raises(TicketError, match=r"pdconn\.cuts"):
        parse_ticket(params)


def usable(made: Ticket, prompt: list[int], **changes: Any) -> int:
    """Tokens that a prefill engine pulls for ``prompt``."""
    side = Pulling(PullRules("here", False, True, 1000))
    asked = request(prompt, {**TURN, "pdconn": {"from": made.to_params(1, 1)}}, **changes)
    side.on_new_request(asked)
    grant(side)
    count, _ = matched(side, asked, 0)
    assert count is not None
    assert side.pulled_until(asked) == count
    return count


def test_a_prompt_takes_what_it_shares() -> None:
    """Against a comparison token by token, cuts anywhere."""
    rng = Random(2)
    for _ in range(300):
        ends = sorted({rng.randint(1, len(SAID) - 1) for _ in range(rng.randint(0, 6))})
        shared = rng.choice((0, rng.randint(0, len(SAID)), len(SAID)))
        prompt = SAID[:shared] + [rng.randrange(50) for _ in range(rng.randint(1, 40))]
        fits = [end for end in (*ends, len(SAID)) if end <= min(shared, len(prompt) - 1)]
        assert usable(ticket(ends), prompt) == max(fits, default=0)


@pytest.mark.parametrize(
    "changes", [{"cache_salt": "t"}, {"lora_request": SimpleNamespace(lora_name="a")}]
)
def test_another_salt_or_adapter_takes_nothing(changes: dict[str, Any]) -> None:
    assert usable(ticket([16, 32]), [*SAID, 1, 2]) == len(SAID)
    assert usable(ticket([16, 32]), [*SAID, 1, 2], **changes) == 0


# What decode lends


@pytest.fixture
def lending(pool: CountedPool, clock: ManualClock) -> Iterator[Lending]:
    [port] = free_ports(1)
    extra = {"lend_back": {"seconds": 1.5, "share": 0.5}, "kv_lease_duration": 60.0}
    settings = read_settings(extra, "127.0.0.1", port, 0)
    made = Lending(settings, "d", "boot", (1, 1), clock=clock)
    made.bind_gpu_block_pool(pool)
    made.serve(welcome("boot"))
    yield made
    made.shutdown()


def welcome(boot: str) -> Welcome:
    geometry = RankGeometry(0, 0, b"address", Cache("BHLNC", filled=False).references)
    return Welcome.in_our_version("d", boot, {}, (geometry,))


def lend(side: Lending, name: str, *blocks: int) -> Any:
    """What the answer of a request carries."""
    asked = request(SAID, {"do_remote_prefill": False}, name)
    return side.lend_back(asked, LendableAnswer(60, (list(blocks),), (16, 48)))


def test_the_answer_carries_what_prefill_is_to_be_asked(
    lending: Lending,
    pool: CountedPool,
) -> None:
    params = lend(lending, "r", 0, 3, 4)
    assert {key: params[key] for key in TURN} == TURN
    made = parse_ticket(ticket_from(params))
    lent = request(SAID, {})
    assert (made.num_tokens, made.prompt) == (60, prefix_digest(lent, 60))
    assert [cut.num_tokens for cut in made.cuts] == [16, 48]
    assert usable(made, [*SAID[:50], 1]) == 48
    assert pool.pinned() == [3, 4]
    settle(lending, pool)
    assert pool.pinned() == [], "by its own seconds, not those of the leases of prompts"
    assert lending.pins.count_leases(LeaseKind.ANSWER) == 0
    assert lending.take_counts()["answers_lent"] == 1


def test_the_oldest_answers_make_room(lending: Lending, pool: CountedPool) -> None:
    """At most half of 16 blocks, of which none is claimed."""
    for number, blocks in enumerate(((1, 2, 3), (4, 5, 6), (7, 8, 9))):
        assert lend(lending, f"r{number}", *blocks) is not None
    for _ in range(500):
        lending.unpin_freed()
        if pool.pinned() == [4, 5, 6, 7, 8, 9]:
            break
        time.sleep(0.01)
    assert pool.pinned() == [4, 5, 6, 7, 8, 9]
    assert lend(lending, "large", *range(1, 10)) is None, "more than all of them may take"
    assert pool.pinned() == [4, 5, 6, 7, 8, 9]
    counts = lending.take_counts()
    assert (counts["answers_lent"], counts["answers_given_up"]) == (3, 1)


def test_an_engine_that_wakes_remembers_no_answer_of_before(
    lending: Lending,
    pool: CountedPool,
) -> None:
    assert lend(lending, "r", 3, 4) is not None
    assert lending.pins.count_leases(LeaseKind.ANSWER) == 1
    lending.serve(welcome("woken"))
    assert (lending.pins.count_leases(LeaseKind.ANSWER), pool.pinned()) == (0, [])


def test_nothing_is_lent_twice_or_of_one_of_several_answers(
    lending: Lending,
    pool: CountedPool,
) -> None:
    assert lend(lending, "0_parent", 1, 2) is None
    assert lend(lending, "r", 1, 2) is not None
    assert lend(lending, "r", 3) is None
    assert lend(lending, "nothing", 0, 0) is None
    assert pool.pinned() == [1, 2]


def test_an_engine_that_stops_does_not_wait_for_next_turns(
    lending: Lending,
    pool: CountedPool,
    clock: ManualClock,
) -> None:
    lend(lending, "r", 1, 2)
    rounds = 0
    while lending.drain_leases(clock() + 60.0):
        rounds += 1
        assert rounds < 100
    assert pool.pinned() == []


@pytest.mark.parametrize(
    ("params", "is_asked"),
    [
        (None, False),
        ({}, False),
        ({"do_remote_prefill": False}, True),
        ({"do_remote_decode": True}, False),
        ({"pdconn": {"lend_back": True}}, True),
        ({"pdconn": {"lend_back": False}}, False),
        ({"pdconn": 7}, True),
    ],
)
def test_who_is_answered_with_a_ticket(params: Any, is_asked: bool) -> None:
    answers = LentAnswers(LendBack())
    assert answers.is_wanted(request(SAID, params)) == is_asked
    assert not answers.is_wanted(request(SAID, params, resumable=True))


@pytest.mark.parametrize(
    ("answers", "num_in_flight", "is_lent"),
    [
        (LentAnswers(LendBack()), 1, True),
        (LentAnswers(LendBack(), has_drafts=True), 4, True),
        (LentAnswers(LendBack(), has_states=True), 0, True),
        (LentAnswers(LendBack(), has_states=True), 1, False),
        (LentAnswers(LendBack(), has_states=True, has_drafts=True), 0, False),
    ],
)
def test_a_state_that_has_moved_on_is_not_lent(
    answers: LentAnswers, num_in_flight: int, is_lent: bool
) -> None:
    """A step under way, or of drafts, leaves another one in its place; rows it leaves alone."""
    asked = request(SAID, {"do_remote_prefill": False}, num_in_flight_tokens=num_in_flight)
    assert answers.is_wanted(asked) == is_lent


# Settings


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, None),
        (True, LendBack()),
        ({}, LendBack()),
        ({"seconds": 5, "share": 0.5}, LendBack(5.0, 0.5)),
    ],
)
def test_how_answers_are_lent_is_configured(value: object, expected: LendBack | None) -> None:
    assert read_settings({"lend_back": value}, "127.0.0.1", 1, 0).lend_back == expected


@pytest.mark.parametrize(
    "value",
    [7, "true", None, [], {"second": 5}, {"seconds": 0}, {"seconds": True}, {"seconds": "5"}]
    + [{"share": share} for share in (0, -1, 0.51, True, "0.1", float("nan"))],
)
def test_wrong_settings_are_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match="lend_back"):
        read_settings({"lend_back": value}, "127.0.0.1", 1, 0)
