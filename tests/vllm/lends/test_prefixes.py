"""Prefixes: who holds one lends it, or says how much it holds; who lacks it takes no other one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

from pdconn.protocol.errors import TicketError
from pdconn.protocol.prefix import lend_of, ticket_from
from pdconn.protocol.ticket import BlockList, Ticket, parse_ticket
from pdconn.puller.commands import CancelPull, ClaimOutcome, ClaimTicket, ReadBlocks
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.lends.lending import Lending
from pdconn.vllm.lends.prefixes import PrefixLends
from pdconn.vllm.patches.request_writes import shorten
from pdconn.vllm.prompt import prefix_digest, prompt_digest
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulling import Pulling
from tests.fakes.simulated.block_pool import CountedPool
from tests.fakes.simulated.hooks import allocated, every_group, finished, matched
from tests.fakes.simulated.requests import vllm_request
from tests.vllm.pulls.test_pulling import kinds

PROMPT = list(range(100, 140))
HELD = 32
BLOCKS = ([1, 2, 3], [0, 5, 6])


def request(tokens: list[int], params: dict[str, Any], name: str = "r", **changes: Any) -> Any:
    """As vLLM's."""
    every = list(tokens)
    made: dict[str, Any] = {
        "request_id": name,
        "prompt_token_ids": list(tokens),
        "_all_token_ids": every,
        "all_token_ids": every,  # vLLM's view of it
        "num_prompt_tokens": len(tokens),
        "num_tokens": len(tokens),
        "num_computed_tokens": len(tokens),
        "kv_transfer_params": params,
        "max_tokens": 9,
    }
    return vllm_request(**made | changes)


def asking(tokens: list[int], lend: object, **changes: Any) -> Any:
    params = {"do_remote_decode": True, "pdconn": {"lend": lend}}
    return request(tokens, params, **changes)


def got(lending: Lending, asked: Any, ids: tuple[list[int], ...]) -> None:
    """The request gets blocks, of full attention and, if there are more, of states."""
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    states = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float16,))
    groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["states"], states)]
    config = every_group(transfer_groups=groups[: len(ids)])
    blocks = TransferBlocks(config, ids)
    lending.update_state_after_alloc(asked, blocks, 0, is_promised=False)


# What clients write


@pytest.mark.parametrize("params", [None, {}, 7, {"pdconn": 7}, {"pdconn": {}}, {"pdconn": None}])
def test_others_ask_for_no_prefix(params: object) -> None:
    assert lend_of(params, 40) is None
    assert ticket_from(params) is None


@pytest.mark.parametrize("lend", [0, 38, 40, -1, True, "39", 39.5, None, [39], 10**30])
def test_a_prefix_is_all_of_the_prompt_but_a_token(lend: object) -> None:
    assert lend_of({"pdconn": {"lend": 39}}, 40) == 39
    assert lend_of({"pdconn": {"lend": 39.0}}, 40) == 39, "as a router's doubles"
    with pytest.raises(TicketError, match=r"pdconn\.lend: expected 39, .* got"):
        lend_of({"pdconn": {"lend": lend}}, 40)


# Digests


def test_a_prefix_is_told_by_all_that_its_kv_depends_on() -> None:
    def image(identifier: str, offset: int) -> Any:
        return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))

    whole = request(PROMPT, {})
    same = [
        request([*PROMPT[:HELD], 7], {}),
        request(PROMPT, {}, mm_features=[image("a", HELD)]),
    ]
    others = [
        request([7, *PROMPT[1:]], {}),
        request(PROMPT, {}, cache_salt="tenant"),
        request(PROMPT, {}, lora_request=SimpleNamespace(lora_name="adapter")),
        request(PROMPT, {}, mm_features=[image("a", HELD - 1)]),
    ]
    digest = prefix_digest(whole, HELD)
    assert {prefix_digest(each, HELD) for each in same} == {digest}
    told = {digest, *(prefix_digest(each, HELD) for each in others)}
    told |= {prefix_digest(whole, HELD - 1), prompt_digest(request(PROMPT[:HELD], {}))}
    assert len(told) == len(others) + 3


# Who holds it


def test_what_is_held_is_lent(lending: Lending, pool: CountedPool) -> None:
    asked = asking(PROMPT[: HELD + 1], HELD)
    lending.on_new_request(asked)
    assert lending.prefixes.note_hit(asked, HELD)
    assert (asked.num_prompt_tokens, asked.max_tokens) == (HELD + 1, 1)
    params = lending.lend_request(asked, ([1, 2, 3],))
    assert params is not None
    ticket = parse_ticket(params)
    assert (ticket.num_tokens, ticket.prompt) == (HELD, prefix_digest(asked, HELD))
    assert pool.pinned() == [1, 2, 3]
    finished(lending, asked)
    assert len(lending.prefixes) == 0


def test_what_is_not_held_is_not_computed(
    lending: Lending,
    pool: CountedPool,
) -> None:
    """Looked up twice, as where there was no room at first: what is held then counts."""
    asked = asking([*PROMPT, *PROMPT], 79)
    lending.on_new_request(asked)
    assert lending.prefixes.note_hit(asked, 79)
    assert lending.prefixes.note_hit(asked, 16)
    assert asked.prompt_token_ids == asked._all_token_ids == PROMPT[:32]
    assert lending.prefixes.note_hit(asked, 32)
    assert asked.num_prompt_tokens == 32
    assert lending.lend_request(asked, ([1, 2],)) == {"pdconn": {"lend": 79, "held": 32}}
    assert pool.pinned() == []


def test_a_model_with_states_lends_a_prefix_of_the_tokens_asked_for(
    lending: Lending,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts that are handed over are computed without their last token; a hit needs it."""
    monkeypatch.setattr(lending.tickets, "has_states", True)
    asked = asking(PROMPT[: HELD + 1], HELD)
    lending.on_new_request(asked)
    assert asked.num_prompt_tokens == HELD + 1


def test_the_state_that_a_prefix_ends_with_is_lent_though_the_request_has_gone_on(
    lending: Lending,
    pool: CountedPool,
) -> None:
    """vLLM takes it off the request before that has ended; its blocks are those it was found in."""
    asked = asking(PROMPT[: HELD + 1], HELD)
    lending.on_new_request(asked)
    assert lending.prefixes.note_hit(asked, HELD)
    found = ([1, 2, 3], [0, 5])
    for _ in range(2):  # again after a preemption: it is pinned already
        got(lending, asked, (found[0], [*found[1], 7]))  # behind it is the state to come
    assert pool.pinned() == [1, 2, 3, 5]
    params = lending.lend_request(asked, ([1, 2, 3], [0, 0, 6]))
    assert params is not None
    assert [block.ids for block in parse_ticket(params).blocks] == [(1, 2, 3), (5,)]
    finished(lending, asked)
    assert pool.pinned() == [1, 2, 3, 5], "by the lease now, and once"
    assert {pool.blocks[block].ref_cnt for block in (1, 2, 3, 5)} == {1}


@pytest.mark.parametrize("held", [HELD, 16])
def test_a_request_for_a_prefix_that_is_aborted_leaves_nothing_pinned(
    held: int,
    lending: Lending,
    pool: CountedPool,
) -> None:
    asked = asking(PROMPT[: HELD + 1], HELD)
    lending.on_new_request(asked)
    lending.prefixes.note_hit(asked, held)
    got(lending, asked, ([1, 2, 3],))
    assert pool.pinned() == ([1, 2, 3] if held == HELD else [])
    finished(lending, asked)
    assert pool.pinned() == []


def test_a_reset_lets_go_of_a_prefix_that_nobody_has_been_given(
    lending: Lending,
    pool: CountedPool,
) -> None:
    """As with reset_running_requests: its request is preempted, looked up again, and refused."""
    asked = asking(PROMPT[: HELD + 1], HELD)
    lending.on_new_request(asked)
    lending.prefixes.note_hit(asked, HELD)
    got(lending, asked, ([1, 2, 3],))
    pool.touch([pool.blocks[3]])
    assert not pool.reset_prefix_cache(), "the request itself holds blocks"
    assert pool.pinned() == [1, 2, 3]
    pool.free_blocks([pool.blocks[3]])
    assert pool.reset_prefix_cache()
    assert pool.pinned() == []
    lending.prefixes.note_hit(asked, 0)
    got(lending, asked, ([4, 5],))
    assert lending.lend_request(asked, ([4, 5],)) == {"pdconn": {"lend": HELD, "held": 0}}
    finished(lending, asked)
    assert pool.pinned() == []


@pytest.mark.parametrize("changes", [{"prompt_embeds": [[0.0]] * 40}, {}], ids=["embeds", "lend"])
def test_a_wrong_wish_is_answered_as_a_prompt(
    changes: dict[str, Any],
    lending: Lending,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = asking(PROMPT, 39 if changes else 7, **changes)
    lending.on_new_request(asked)
    assert not lending.prefixes.note_hit(asked, 0)
    assert asked.num_prompt_tokens == 40
    assert "no prefix is lent" in caplog.text
    assert lending.prefixes.prefix_of("r") is None


def test_other_requests_are_left_alone() -> None:
    lends = PrefixLends(16)
    asked = request(PROMPT, {"do_remote_decode": True})
    assert not lends.takes_request(asked)
    assert not lends.note_hit(asked, 0)
    assert (asked.max_tokens, lends.refusal_of("r", is_within=True)) == (9, None)


# Who lacks it


def lent(num_tokens: int = HELD, **changes: Any) -> Ticket:
    """By an engine that was asked with the same salt and adapter."""
    digest = prefix_digest(request(PROMPT, {}, **changes), num_tokens)
    blocks = BlockList(0, (7, 8)), BlockList(1, (3,))
    return Ticket("h", "boot", "lend", "localhost", 5600, num_tokens, digest, blocks)


def computing(ticket: object, tokens: list[int] | None = None, **changes: Any) -> Any:
    """A prefill request that names a ticket for its prefix."""
    given = ticket.to_params(1, 1) if isinstance(ticket, Ticket) else ticket
    params = {"do_remote_decode": True, "pdconn": {"from": given}}
    return request(PROMPT if tokens is None else tokens, params, **changes)


def consumer(**changes: Any) -> Pulling:
    return Pulling(PullRules("here", False, True, 1000, **changes))


def grant(side: Pulling, ranks: int = 1, problem: str | None = None) -> None:
    [claim] = [each for each in side.take_commands() if isinstance(each, ClaimTicket)]
    assert claim.is_awaited
    side.note_claims([ClaimOutcome("r", claim.pull, rank, problem) for rank in range(ranks)])


def test_a_prefix_is_pulled_behind_the_local_hit_and_the_rest_is_computed() -> None:
    side, asked = consumer(), computing(lent())
    side.on_new_request(asked)
    assert side.pulled_until(asked) == 0
    assert matched(side, asked, 16) == (None, False)  # until the holder grants it
    grant(side)
    assert side.pulled_until(asked) == HELD
    assert matched(side, asked, 16) == (16, True)
    allocated(side, asked, BLOCKS, 16)
    [read] = side.take_commands()
    assert isinstance(read, ReadBlocks)
    assert read.need.tokens == (range(16, HELD),) * 2
    side.end_pull("r")
    assert matched(side, asked, 0) == (0, False)
    assert asked.kv_transfer_params["do_remote_decode"]


def test_every_rank_must_be_granted_it() -> None:
    side, asked = consumer(num_ranks=2), computing(lent())
    side.on_new_request(asked)
    grant(side, ranks=1)
    assert matched(side, asked, 0) == (None, False)


def test_a_holder_that_is_gone_costs_no_failure() -> None:
    side, asked = consumer(), computing(lent())
    side.on_new_request(asked)
    grant(side, problem="unreachable")
    assert matched(side, asked, 0) == (0, False)
    allocated(side, asked, BLOCKS, 0)
    assert kinds(side.take_commands()) == [CancelPull]
    assert len(side) == 0


def test_what_is_held_already_is_given_back() -> None:
    side, asked = consumer(), computing(lent())
    side.on_new_request(asked)
    grant(side)
    assert matched(side, asked, HELD) == (0, False)
    allocated(side, asked, BLOCKS, 0)
    assert kinds(side.take_commands()) == [CancelPull]


@pytest.mark.parametrize(
    ("ticket", "changes"),
    [
        (lent(), {"tokens": [7, *PROMPT[1:]]}),
        (lent(), {"tokens": [*PROMPT[:20], *PROMPT[25:], 1, 2, 3]}),
        (lent(), {"cache_salt": "another tenant"}),
        (lent(cache_salt="tenant"), {}),
        (lent(), {"lora_request": SimpleNamespace(lora_name="adapter")}),
        (lent(), {"tokens": PROMPT[:HELD]}),
        (lent(), {"prompt_embeds": [[0.0]] * 40}),
    ],
    ids=["first token", "edited", "salt", "no salt", "adapter", "too long", "embeddings"],
)
@pytest.mark.parametrize("recompute", [True, False])
def test_a_prefix_of_another_prompt_is_not_pulled(
    ticket: Ticket, changes: dict[str, Any], recompute: bool
) -> None:
    """And it costs the request nothing, whatever the policy."""
    side, asked = Pulling(PullRules("here", recompute, True, 1000)), computing(ticket, **changes)
    side.on_new_request(asked)
    grant(side)
    assert side.pulled_until(asked) == 0
    assert matched(side, asked, 0) == (0, False)
    allocated(side, asked, BLOCKS, 0)
    assert kinds(side.take_commands()) == [CancelPull]


def test_without_the_digest_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("pdconn.vllm.pulls.tracked.prefix_digests", lambda *_: [lent().prompt])
    side, asked = consumer(), computing(lent(), tokens=[7, *PROMPT[1:]])
    side.on_new_request(asked)
    grant(side)
    assert matched(side, asked, 0) == (HELD, True)


def test_a_ticket_for_a_whole_prompt_is_none_for_a_prefix() -> None:
    digest = prompt_digest(request(PROMPT[:HELD], {}))
    whole = Ticket("h", "boot", "lend", "localhost", 5600, HELD, digest, lent().blocks)
    side, asked = consumer(), computing(whole)
    side.on_new_request(asked)
    assert matched(side, asked, 0) == (0, False)


@pytest.mark.parametrize("given", [7, "ticket", [], {}, {"pdconn": {"version": 2}}, lent(0)])
def test_what_is_no_ticket_is_ignored(given: object, caplog: pytest.LogCaptureFixture) -> None:
    side, asked = consumer(), computing(given)
    side.on_new_request(asked)
    assert matched(side, asked, 0) == (0, False)
    assert side.take_commands() == []
    assert "ticket for a prefix refused: " in caplog.text


def test_a_model_with_states_takes_no_prefix_of_all_that_is_computed() -> None:
    """Its prompt has lost the token that decode computes; the state of one more is too far."""
    side, asked = consumer(has_states=True), computing(lent(39))
    shorten(asked, 39)
    side.on_new_request(asked)
    grant(side)
    assert matched(side, asked, 0) == (0, False)
