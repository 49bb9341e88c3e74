"""Laws of the decode scheduler: every ticket is pulled, given up, or failed; once."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest

from pdconn.lifecycle.turns import Urgency
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.puller.commands import CancelPull, ClaimTicket, Command, FailPull, ReadBlocks
from pdconn.store.format.row_names import RowNames
from pdconn.vllm.blocks.splits import UNSPLIT, Splits
from pdconn.vllm.prompt import prompt_digest
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulling import Pulling
from tests.fakes.simulated.hooks import allocated, finished, matched
from tests.fakes.simulated.requests import vllm_request

PROMPT = list(range(100, 140))
MAX_MODEL_LEN = 100_000
BLOCKS = ([1, 2, 3], [0, 5, 6])


def request(name: str = "d", prompt: list[int] | None = None, **changes: Any) -> Any:
    """A decode request with a ticket for ``prompt``; ``changes`` alter its parameters."""
    tokens = PROMPT if prompt is None else prompt
    made = vllm_request(
        request_id=name,
        prompt_token_ids=list(tokens),
        num_prompt_tokens=len(tokens),
        num_tokens=len(tokens),
        lora_request=None,
        mm_features=[],
    )
    ticket = Ticket(
        "p", "boot", "r", "localhost", 5600, 40,
        prompt_digest(vllm_request(prompt_token_ids=PROMPT)),
        (BlockList(0, (7, 8, 9)), BlockList(1, (3, 4))),
    )  # fmt: skip
    made.kv_transfer_params = {**ticket.to_params(1, 1), **changes}
    return made


def own_ticket() -> dict[str, Any]:
    """Parameters of a request whose ticket this engine made itself, in this boot."""
    params = request().kv_transfer_params["pdconn"]
    return {"pdconn": {**params, "incarnation": "here"}}


def consumer(recompute: bool = False, prefix_caching: bool = False) -> Pulling:
    return Pulling(PullRules("here", recompute, prefix_caching, max_model_len=MAX_MODEL_LEN))


def kinds(commands: list[Command]) -> list[type[Command]]:
    return [type(command) for command in commands]


def test_a_ticket_is_claimed_at_its_arrival_and_read_with_blocks() -> None:
    side, asked = consumer(), request()
    side.on_new_request(asked)
    [claim] = side.take_commands()
    assert isinstance(claim, ClaimTicket)
    assert (claim.request, claim.ticket.request_id) == ("d", "r")
    assert claim.pull.startswith("here/")
    assert matched(side, asked, 0) == (39, True)
    allocated(side, asked, BLOCKS, 39)
    [read] = side.take_commands()
    assert isinstance(read, ReadBlocks)
    assert (read.request, read.need.tokens) == ("d", (range(39),) * 2)
    assert read.need.blocks == (BlockList(0, (1, 2, 3)), BlockList(1, (5, 6)))
    assert read.urgency is Urgency.PULL
    side.end_pull("d")
    assert len(side) == 0


def test_a_prefetch_is_read_as_one() -> None:
    side, asked = consumer(), request()
    asked.kv_transfer_params["pdconn"]["prefetch"] = True
    side.on_new_request(asked)
    matched(side, asked, 0)
    allocated(side, asked, BLOCKS, 39)
    [_, read] = side.take_commands()
    assert isinstance(read, ReadBlocks)
    assert read.urgency is Urgency.PREFETCH


@pytest.mark.parametrize("salt", [None, "", "one", "two"])
def test_a_read_names_its_tenant_as_a_store_does(salt: str | None) -> None:
    side, asked = consumer(), request()
    asked.cache_salt = salt
    side.on_new_request(asked)
    matched(side, asked, 0)
    allocated(side, asked, BLOCKS, 39)
    [_, read] = side.take_commands()
    assert isinstance(read, ReadBlocks)
    assert read.tenant == RowNames().tenant(salt)
    assert bool(read.tenant) == bool(salt)


def test_commands_reach_a_worker_in_another_process_as_they_were_made() -> None:
    """vLLM pickles a step's metadata."""
    side, asked, wrong = consumer(), request(), request("w", remote_port="x")
    for each in (asked, wrong):
        side.on_new_request(each)
        matched(side, each, 0)
        allocated(side, each, BLOCKS, 39)
        finished(side, each)
    commands = side.take_commands()
    assert set(kinds(commands)) == {ClaimTicket, ReadBlocks, FailPull, CancelPull}
    assert pickle.loads(pickle.dumps(commands)) == commands


def test_the_last_token_is_never_pulled() -> None:
    side, asked = consumer(), request(prompt=PROMPT[:1])
    side.on_new_request(asked)
    assert matched(side, asked, 0) == (0, False)


def test_a_local_hit_is_not_pulled_again() -> None:
    side, asked = consumer(), request()
    side.on_new_request(asked)
    side.take_commands()
    assert matched(side, asked, 32) == (7, True)
    allocated(side, asked, BLOCKS, 7)
    [read] = side.take_commands()
    assert isinstance(read, ReadBlocks)
    assert read.need.tokens == (range(32, 39),) * 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_port": "x"},
        {"pdconn": None},
        {"remote_num_tokens": "x"},
    ],
)
def test_a_wrong_ticket_fails_the_request_when_failing_is_the_policy(wrong: Any) -> None:
    side, asked = consumer(), request(**wrong)
    side.on_new_request(asked)
    assert matched(side, asked, 0) == (39, True)
    allocated(side, asked, BLOCKS, 39)
    commands = side.take_commands()
    assert ReadBlocks not in kinds(commands)
    [failed] = [command for command in commands if isinstance(command, FailPull)]
    assert failed.request == "d"
    assert "expected" in failed.reason
    side.end_pull("d")
    assert len(side) == 0


def test_a_wrong_ticket_is_recomputed_when_that_is_the_policy() -> None:
    side, asked = consumer(recompute=True), request(remote_port="x")
    side.on_new_request(asked)
    assert matched(side, asked, 0) == (0, False)
    allocated(side, asked, BLOCKS, 0)
    assert side.take_commands() == []
    assert len(side) == 0


NO_DICT = ["a ticket", 7, 10**5000, 1.5, [{"do_remote_prefill": True}], True]


@pytest.mark.parametrize("params", NO_DICT, ids=lambda params: type(params).__name__)
@pytest.mark.parametrize("recompute", [True, False])
def test_parameters_that_are_no_dict_are_a_wrong_ticket(
    params: object, recompute: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """They ended the engine's step: ``'str' object has no attribute 'get'``."""
    side, asked = consumer(recompute), request()
    asked.kv_transfer_params = params
    with caplog.at_level(logging.WARNING, logger="pdconn"):
        side.on_new_request(asked)
    assert asked.kv_transfer_params.get("do_remote_prefill"), "vLLM asks a dict next"
    assert matched(side, asked, 0) == ((0, False) if recompute else (39, True))
    allocated(side, asked, BLOCKS, 0 if recompute else 39)
    assert kinds(side.take_commands()) == ([] if recompute else [FailPull])
    side.end_pull("d")
    assert len(side) == 0
    [line] = caplog.messages
    assert line.startswith("pdconn: ticket refused: kv_transfer_params: expected an object")
    assert len(line) < 250


@pytest.mark.parametrize("params", [None, {}, "", [], 0], ids=repr)
def test_no_parameters_are_no_ticket(params: object) -> None:
    side, asked = consumer(), request()
    asked.kv_transfer_params = params
    side.on_new_request(asked)
    assert len(side) == 0


def blocks_listed(count: int) -> dict[str, Any]:
    return {"remote_block_ids": [list(range(1, count)), [1]]}


def test_a_ticket_of_more_blocks_than_its_prompt_can_have_is_wrong() -> None:
    """Of a prompt of 40 tokens; one of millions of ids held the engine for seconds."""
    side, asked = consumer(), request(**blocks_listed(100_000))
    side.on_new_request(asked)
    matched(side, asked, 0)
    allocated(side, asked, BLOCKS, 39)
    [failed] = side.take_commands()
    assert isinstance(failed, FailPull)
    assert failed.reason == "remote_block_ids: expected at most 4256 blocks, got 100000"


def test_a_rejected_request_gives_the_ticket_of_a_long_prompt_back() -> None:
    """vLLM sends one token in its stead; judged by that, its lease would wait for its end."""
    side, asked = consumer(), request(prompt=[0], **blocks_listed(100_000))
    asked.abort_immediately = True
    side.on_new_request(asked)
    finished(side, asked)
    assert kinds(side.take_commands()) == [ClaimTicket, CancelPull]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "prompt", [[*PROMPT[:-1], 7], PROMPT[:-1], [*PROMPT, 7], [*PROMPT, *PROMPT]]
)
def test_another_prompts_ticket_is_given_up_and_its_request_computed(
    prompt: list[int], recompute: bool
) -> None:
    """A chat template that asks the clock: each chat was answered 500 under the policy fail."""
    side, asked = consumer(recompute), request(prompt=prompt)
    side.on_new_request(asked)
    assert matched(side, asked, 0) == (0, False)
    allocated(side, asked, BLOCKS, 0)
    claim, cancel = side.take_commands()
    assert isinstance(claim, ClaimTicket)
    assert cancel == CancelPull("d")
    assert side.take_counts() == {"tickets_mistaken": 1}
    assert len(side) == 0


@pytest.mark.parametrize("recompute", [True, False])
def test_a_ticket_of_this_very_engine_is_left_out_and_its_request_computed(
    recompute: bool,
) -> None:
    """A router that chose one engine for both legs: the pull failed, and so did the request."""
    side, asked = consumer(recompute), request(**own_ticket())
    taken_back: list[Ticket] = []
    side.take_back_own = taken_back.append
    side.on_new_request(request("other"))
    assert not taken_back, "it is another engine's"
    finished(side, request("other"))
    side.take_commands()
    side.on_new_request(asked)
    assert [ticket.incarnation for ticket in taken_back] == ["here"]
    assert matched(side, asked, 32) == (0, False)
    allocated(side, asked, BLOCKS, 0)
    assert ClaimTicket not in kinds(side.take_commands())
    assert side.take_counts() == {"tickets_gone": 1}
    assert len(side) == 0


def test_a_ticket_that_is_none_still_costs_what_the_policy_says() -> None:
    """The control: nobody knows whose mistake it is."""
    side, asked = consumer(), request(remote_port="x")
    side.on_new_request(asked)
    assert matched(side, asked, 0) == (39, True)
    assert side.take_counts() == {}


def test_siblings_wait_for_the_first_pull_and_then_hit_it() -> None:
    side = consumer(prefix_caching=True)
    first, second = request("0_d"), request("1_d")
    for asked in (first, second):
        side.on_new_request(asked)
    matched(side, first, 0)
    allocated(side, first, BLOCKS, 39)
    assert matched(side, second, 0) == (None, False)
    side.end_pull("0_d")
    assert matched(side, second, 32) == (7, True)


def test_siblings_without_prefix_caching_pull_each_for_itself() -> None:
    side = consumer()
    first, second = request("0_d"), request("1_d")
    for asked in (first, second):
        side.on_new_request(asked)
    for asked in (first, second):
        assert matched(side, asked, 0) == (39, True)
        allocated(side, asked, BLOCKS, 39)
    commands = side.take_commands()
    assert len({command.pull for command in commands if isinstance(command, ClaimTicket)}) == 2
    assert kinds(commands).count(ReadBlocks) == 2


def test_a_sibling_that_comes_while_the_first_pulls_waits_and_claims_nothing() -> None:
    """The lease may be consumed before the engine learns that the first pull is over."""
    side, first, late = consumer(prefix_caching=True), request("0_d"), request("1_d")
    side.on_new_request(first)
    matched(side, first, 0)
    allocated(side, first, BLOCKS, 39)
    side.take_commands()
    side.on_new_request(late)
    assert side.take_commands() == []
    assert matched(side, late, 0) == (None, False)
    side.end_pull("0_d")
    assert matched(side, late, 32) == (0, False)


def test_an_unrelated_request_with_a_used_ticket_is_no_sibling() -> None:
    """It asks the lender, which refuses: a consumed ticket is not silently recomputed."""
    side, first, other = consumer(), request("0_d"), request("1_e")
    side.on_new_request(first)
    matched(side, first, 0)
    allocated(side, first, BLOCKS, 39)
    side.end_pull("0_d")
    side.take_commands()
    side.on_new_request(other)
    assert kinds(side.take_commands()) == [ClaimTicket]


def test_requests_without_a_ticket_are_left_alone() -> None:
    side, asked = consumer(), request()
    asked.kv_transfer_params = None
    side.on_new_request(asked)
    assert matched(side, asked, 0) == (0, False)
    allocated(side, asked, BLOCKS, 0)
    finished(side, asked)
    assert len(side) == 0


@pytest.mark.parametrize("held", [0, 16, 36, 37, 39])
def test_what_a_drafter_looks_ahead_to_is_not_pulled(held: int) -> None:
    side = Pulling(PullRules("here", True, False, MAX_MODEL_LEN, num_lookahead=3))
    asked = request()
    side.on_new_request(asked)
    count = max(0, 37 - held)
    assert matched(side, asked, held) == (count, count > 0)
    allocated(side, asked, BLOCKS, count)
    last = side.take_commands()[-1]
    if count:
        assert isinstance(last, ReadBlocks)
        assert set(last.need.tokens) == {range(held, 37)}
    else:
        assert isinstance(last, CancelPull)


@pytest.mark.parametrize(("computed", "taken"), [(38, False), (39, True), (40, False)])
def test_states_are_of_the_last_token_that_prefill_computed(computed: int, taken: bool) -> None:
    """Those of a prefill engine that computed the whole prompt would see its last token twice."""
    side = Pulling(PullRules("here", True, False, MAX_MODEL_LEN, has_states=True))
    asked = request(remote_num_tokens=computed)
    side.on_new_request(asked)
    assert matched(side, asked, 0) == ((39, True) if taken else (0, False))


@pytest.mark.parametrize("splits", [UNSPLIT, Splits((2, 4))])
def test_kernel_blocks_are_read_into_and_the_engines_are_quarantined(splits: Splits) -> None:
    side, asked = consumer(), request()
    side.workers_registered(splits)
    side.on_new_request(asked)
    matched(side, asked, 16)
    allocated(side, asked, BLOCKS, 23)
    read = side.take_commands()[-1]
    assert isinstance(read, ReadBlocks)
    assert read.need.tokens == (range(16, 39),) * 2, "tokens, whatever the blocks"
    assert side.blocks_of("d") == (1, 2, 3, 5, 6)
    if splits is UNSPLIT:
        assert read.need.blocks == (BlockList(0, (1, 2, 3)), BlockList(1, (5, 6)))
    else:
        assert read.need.blocks == (
            BlockList(0, (2, 3, 4, 5, 6, 7)),
            BlockList(4, (20, 21, 22, 23, 24, 25, 26, 27)),
        )
