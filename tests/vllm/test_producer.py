"""Laws of the prefill scheduler: what is lent is pinned, and unpinned exactly once."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.lab.ports import free_ports
from pdconn.protocol.framing import frame
from pdconn.protocol.messages import (
    PROTOCOL_VERSION,
    Claim,
    Confirm,
    Confirmed,
    Done,
    Granted,
    Hello,
    RankGeometry,
    Reader,
    RefusalReason,
    Refused,
    Renew,
    Welcome,
    encode,
)
from pdconn.protocol.ticket import parse_ticket
from pdconn.vllm.blocks.splits import Splits
from pdconn.vllm.config import read_settings
from pdconn.vllm.producer import ProducerScheduler
from pdconn.vllm.prompt import drop_wrong_params, prompt_digest
from tests.fakes.pair import Cache
from tests.faults.raw_clients import RawReader


class Block:
    def __init__(self, number: int) -> None:
        self.block_id, self.ref_cnt = number, 0


class Pool:
    """vLLM's block pool, as far as pinning goes."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(16)]
        self.num_gpu_blocks = len(self.blocks)
        self.freed: list[int] = []

    def touch(self, blocks: list[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def get_num_free_blocks(self) -> int:
        """All but the null block and those in use."""
        return self.num_gpu_blocks - 1 - len(self.pinned())

    def reset_prefix_cache(self) -> bool:
        """As vLLM's: refuses while any block is in use."""
        return not self.pinned()

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def pinned(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]


def request(name: str, prompt: tuple[int, ...] = (1, 2, 3)) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        num_computed_tokens=len(prompt),
        num_tokens=len(prompt),
        mm_features=[],
    )


class Clock:
    """Seconds, as the test says."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def lease_s() -> float:
    return 2.5


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lending(pool: Pool, lease_s: float, clock: Clock) -> Iterator[ProducerScheduler]:
    [port] = free_ports(1)
    settings = read_settings({"kv_lease_duration": lease_s}, "127.0.0.1", port, 0)
    made = ProducerScheduler(settings, "p", "boot", (1, 1), clock=clock)
    made.bind(pool)
    geometry = RankGeometry(0, 0, b"address", Cache("BHLNC", filled=False).references)
    made.serve(Welcome.of("p", "boot", {}, (geometry,)))
    yield made
    made.close()


def settle(lending: ProducerScheduler, pool: Pool, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while pool.pinned() and time.monotonic() < give_up:
        lending.unpin_freed()
        time.sleep(0.01)


def test_lent_blocks_are_pinned_until_the_lease_ends(
    lending: ProducerScheduler, pool: Pool
) -> None:
    params = lending.lend(request("r"), ([0, 0, 3, 4], [7]))
    assert params is not None
    assert pool.pinned() == [3, 4, 7]
    lending.unpin_freed()
    assert pool.pinned() == [3, 4, 7]
    settle(lending, pool)
    assert pool.freed == [7, 4, 3]


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_lease_that_is_given_up_is_unpinned_long_before_its_time(
    lending: ProducerScheduler, pool: Pool, lease_s: float
) -> None:
    params = lending.lend(request("r"), ([3],))
    assert params is not None
    ticket = parse_ticket(params)
    began = time.monotonic()
    with socket.create_connection((ticket.host, ticket.port)) as reader:
        done = Done(ticket.request_id, Reader("d", 0, 1), ticket.digest())
        reader.sendall(frame(encode([Hello(PROTOCOL_VERSION, "d", ticket.incarnation), done])))
        settle(lending, pool)
    assert pool.freed == [3]
    assert time.monotonic() - began < lease_s / 2


def test_nothing_to_lend_is_no_ticket(lending: ProducerScheduler, pool: Pool) -> None:
    assert lending.lend(request("r"), ([0, 0], [])) is None
    assert pool.pinned() == []


def test_two_leases_on_one_block_are_two_references(lending: ProducerScheduler, pool: Pool) -> None:
    lending.lend(request("a"), ([5],))
    lending.lend(request("b"), ([5],))
    assert pool.blocks[5].ref_cnt == 2
    settle(lending, pool)
    assert pool.blocks[5].ref_cnt == 0


# A cache reset: /reset_prefix_cache, /pause?clear_cache=true, new weights.


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_reset_takes_back_what_is_lent_and_succeeds(
    lending: ProducerScheduler, pool: Pool, lease_s: float
) -> None:
    """Otherwise vLLM answers `success: false`, or 500 to a pause, and stays paused."""
    params = lending.lend(request("r"), ([3, 4],))
    assert params is not None
    assert pool.reset_prefix_cache()
    assert pool.freed == [4, 3]
    with RawReader(lending_port(params), wants="boot") as reader:
        ticket = parse_ticket(params)
        reader.say(Claim(1, "r", Reader("d", 0, 1), ticket.digest()))
        assert reader.hear(Refused).why is RefusalReason.ABORTED
    assert lending.take_counts()["freed_aborted"] == 1


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_reset_revokes_what_is_being_read_and_nothing_of_it_is_confirmed(
    lending: ProducerScheduler, pool: Pool, lease_s: float
) -> None:
    params = lending.lend(request("r"), ([3],))
    assert params is not None
    ticket, me = parse_ticket(params), Reader("d", 0, 1)
    with RawReader(lending_port(params), wants="boot") as reader:
        reader.say(Claim(1, "r", me, ticket.digest()))
        reader.hear(Granted)
        began = time.monotonic()
        assert pool.reset_prefix_cache()
        assert time.monotonic() - began < lease_s / 2
        assert pool.freed == [3]
        for message in (Renew(2, "r", me), Confirm(3, "r", me, ticket.digest())):
            reader.say(message)
            assert reader.hear(Refused).why is RefusalReason.ABORTED


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_reset_waits_for_what_is_being_read(
    lending: ProducerScheduler, pool: Pool, lease_s: float
) -> None:
    """A reset on an engine in use fails no request that is about to be handed over."""
    params = lending.lend(request("r"), ([3],))
    assert params is not None
    ticket, me = parse_ticket(params), Reader("d", 0, 1)
    with RawReader(lending_port(params), wants="boot") as reader, ThreadPoolExecutor(1) as other:
        reader.say(Claim(1, "r", me, ticket.digest()))
        reader.hear(Granted)
        done = other.submit(pool.reset_prefix_cache)
        time.sleep(0.1)
        assert not done.done()
        reader.say(Confirm(2, "r", me, ticket.digest()))
        reader.hear(Confirmed)
        assert done.result()
    assert lending.take_counts()["confirmed"] == 1


def test_a_reset_of_an_engine_that_lends_nothing_is_vllms_own(
    lending: ProducerScheduler, pool: Pool
) -> None:
    assert pool.reset_prefix_cache()
    pool.touch([pool.blocks[5]])
    assert not pool.reset_prefix_cache(), "a running request's block is not ours to take back"


def test_a_reset_that_cannot_succeed_takes_nothing_back(
    lending: ProducerScheduler, pool: Pool
) -> None:
    """A request is running: vLLM resets nothing, and what is lent must not be lost for that."""
    lending.lend(request("r"), ([3],))
    pool.touch([pool.blocks[5]])
    assert not pool.reset_prefix_cache()
    assert pool.pinned() == [3, 5]
    pool.free_blocks([pool.blocks[5]])
    assert pool.reset_prefix_cache()
    assert pool.pinned() == []


# Shutdown.


@pytest.mark.parametrize("lease_s", [60.0])
def test_an_engine_that_was_asked_to_stop_waits_until_its_leases_are_read(
    lending: ProducerScheduler, pool: Pool, clock: Clock, lease_s: float
) -> None:
    """Otherwise every ticket that is not redeemed yet is a failed request."""
    params = lending.lend(request("r"), ([3],))
    assert params is not None
    ticket = parse_ticket(params)
    looks, over = 0, time.monotonic() + 0.5
    while lending.drain(clock.now + lease_s):
        looks += 1
        if time.monotonic() > over:
            break
    assert pool.pinned() == [3]
    assert 0 < looks < 100, "it spins, or does not wait"
    with RawReader(lending_port(params), wants="boot") as reader:
        reader.say(Done("r", Reader("d", 0, 1), ticket.digest()))
        give_up = time.monotonic() + 20
        while lending.drain(clock.now + lease_s):
            assert time.monotonic() < give_up
    assert pool.pinned() == []


@pytest.mark.parametrize("lease_s", [60.0])
def test_the_wait_for_leases_is_bounded(
    lending: ProducerScheduler,
    pool: Pool,
    clock: Clock,
    lease_s: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It counts from the signal: vLLM asks only when no request is left, which may be late."""
    lending.lend(request("r"), ([3],))
    until = clock.now + 9.0
    clock.now += 8.9
    assert lending.drain(until)
    clock.now += 0.1
    for _ in range(3):  # vLLM asks several times in a row
        assert not lending.drain(until)
    assert pool.pinned() == [3]
    told = [record.message for record in caplog.records if "stopping with leases" in record.message]
    assert told == ["pdconn: stopping with leases unread: leases=1"]


def test_an_engine_that_lends_nothing_stops_at_once(
    lending: ProducerScheduler, clock: Clock
) -> None:
    assert not lending.drain(clock.now + 60.0)


def lending_port(params: dict[str, Any]) -> int:
    return parse_ticket(params).port


@pytest.mark.parametrize(
    "name", ["r" * 600, "cmpl-\u200b1", "a\tb"], ids=["long", "zero width", "a tab"]
)
def test_what_decode_would_refuse_is_not_lent(
    lending: ProducerScheduler, pool: Pool, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was lent, decode refused its ticket, and its blocks stayed pinned for a whole lease."""
    with caplog.at_level(logging.WARNING, logger="pdconn"):
        assert lending.lend(request(name), ([3, 4],)) is None
    assert pool.pinned() == []
    [line] = caplog.messages
    assert line.startswith("pdconn: not lent: remote_request_id: expected 1 to 512 printable")
    assert line.isprintable()
    assert len(line) < 300


def test_the_longest_name_that_decode_takes_is_lent(lending: ProducerScheduler) -> None:
    params = lending.lend(request("r" * 512), ([3],))
    assert parse_ticket(params).request_id == "r" * 512


def test_more_blocks_than_decode_takes_are_not_lent(lending: ProducerScheduler, pool: Pool) -> None:
    assert lending.lend(request("r"), ([3] * 5000,)) is None
    assert pool.pinned() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("lease_s", [60.0])
def test_the_children_of_a_request_share_one_lease(
    lending: ProducerScheduler, pool: Pool, order: tuple[int, ...], lease_s: float
) -> None:
    """vLLM shows the ticket of the last one: n - 1 leases were pinned until they expired.

    The prompt's blocks are shared by prefix caching (3, 4), and the last one is each child's.
    """
    answers = [lending.lend(request(f"{n}_cmpl-x"), ([3, 4, 5 + n],)) for n in order]
    assert answers == [answers[0]] * 3
    assert len({id(answer) for answer in answers}) == 3, "vLLM adds to each answer"
    shown = parse_ticket(answers[-1])
    assert shown.request_id == f"{order[0]}_cmpl-x"
    assert pool.pinned() == [3, 4, 5 + order[0]]
    with socket.create_connection((shown.host, shown.port)) as reader:
        done = Done(shown.request_id, Reader("d", 0, 1), shown.digest())
        reader.sendall(frame(encode([Hello(PROTOCOL_VERSION, "d", shown.incarnation), done])))
        settle(lending, pool)
    assert pool.pinned() == []
    assert len(lending._shared) == 0


def test_children_of_several_requests_share_nothing(lending: ProducerScheduler) -> None:
    children = [request("0_a"), request("0_b"), request("1_a", prompt=(7, 8)), request("c")]
    answers = [lending.lend(child, ([3],)) for child in children]
    lent = [parse_ticket(params).request_id for params in answers]
    assert lent == ["0_a", "0_b", "1_a", "c"]


@pytest.mark.parametrize("lease_s", [60.0])
def test_a_child_that_finishes_late_gets_a_lease_that_is_not_about_to_end(
    lending: ProducerScheduler, clock: Clock, lease_s: float
) -> None:
    names = []
    for number, waited_s in enumerate((0.0, 0.4 * lease_s, 0.2 * lease_s)):
        clock.now += waited_s
        params = lending.lend(request(f"{number}_a"), ([3],))
        names.append(parse_ticket(params).request_id)
    assert names == ["0_a", "0_a", "2_a"]


def test_a_child_whose_sibling_is_not_lent_any_more_is_lent(
    lending: ProducerScheduler, pool: Pool
) -> None:
    lending.lend(request("0_a"), ([3],))
    settle(lending, pool)
    params = lending.lend(request("1_a"), ([3],))
    assert parse_ticket(params).request_id == "1_a"


@pytest.mark.parametrize("params", ["text", 7, 10**5000, [], True], ids=lambda p: type(p).__name__)
def test_a_prefill_engine_ignores_parameters_that_are_no_dict(
    params: object, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM asks them next: ``'str' object has no attribute 'get'`` ended the engine."""
    asked = SimpleNamespace(request_id="r", kv_transfer_params=params)
    with caplog.at_level(logging.WARNING, logger="pdconn"):
        drop_wrong_params(asked)
    assert asked.kv_transfer_params is None
    [line] = caplog.messages
    assert "kv_transfer_params: expected an object, got" in line


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}])
def test_a_prefill_engine_leaves_other_parameters_alone(
    params: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    asked = SimpleNamespace(request_id="r", kv_transfer_params=params)
    drop_wrong_params(asked)
    assert asked.kv_transfer_params == params
    assert not caplog.messages


# Prompts of models with states


def state_request(*prompt: int, **changes: Any) -> Any:
    """As vLLM's, of which prefill is asked for."""
    made = request("r", prompt)
    made._all_token_ids = list(prompt)
    made.kv_transfer_params = {"do_remote_decode": True}
    made.max_tokens, made.skip_reading_prefix_cache = 9, False
    made.prompt_embeds, made.resumable = None, False
    return SimpleNamespace(**{**vars(made), **changes})


def with_states() -> ProducerScheduler:
    [port] = free_ports(1)
    settings = read_settings({}, "127.0.0.1", port, 0)
    return ProducerScheduler(settings, "p", "boot", (1, 1), has_states=True)


def test_a_model_with_states_leaves_the_last_token_to_decode(
    pool: Pool, lending: ProducerScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ticket names the whole prompt, and the tokens that were computed."""
    monkeypatch.setattr(lending, "_has_states", True)
    whole, made = prompt_digest(state_request(7, 8, 9)), state_request(7, 8, 9)
    lending.arrived(made)
    lending.arrived(made)  # as a request that was preempted might
    assert (made.prompt_token_ids, made._all_token_ids) == ([7, 8], [7, 8])
    assert (made.num_prompt_tokens, made.max_tokens) == (2, 1)
    made.num_computed_tokens = 2
    params = lending.lend(made, ([1],))
    assert params is not None
    ticket = parse_ticket(params, 8)
    assert (ticket.num_tokens, ticket.prompt) == (2, whole)
    lending.finished(made)
    assert lending._shortened == {}


@pytest.mark.parametrize(
    "made",
    [
        state_request(7),
        state_request(7, 8, 9, skip_reading_prefix_cache=True),
        state_request(7, 8, 9, kv_transfer_params=None),
        state_request(7, 8, 9, kv_transfer_params={"do_remote_prefill": True}),
        state_request(7, 8, 9, prompt_token_ids=None),
        state_request(7, 8, 9, prompt_embeds=[[0.0]] * 3),
        state_request(7, 8, 9, resumable=True),
    ],
    ids=["one token", "by decode", "no hand-over", "decode", "embeddings", "mixed", "session"],
)
def test_other_prompts_are_computed_whole(made: Any) -> None:
    before = made._all_token_ids[:]
    with_states().arrived(made)
    assert made._all_token_ids == before
    assert made.max_tokens == 9


def test_a_model_without_states_computes_the_whole_prompt(lending: ProducerScheduler) -> None:
    made = state_request(7, 8, 9)
    lending.arrived(made)
    assert made.prompt_token_ids == [7, 8, 9]


def test_kernel_blocks_are_lent_and_the_engines_blocks_are_pinned(
    lending: ProducerScheduler, pool: Pool
) -> None:
    lending._splits = Splits((2,))
    params = lending.lend(request("a"), ([0, 2, 0, 3],))
    assert params is not None
    assert params["remote_block_ids"] == [[4, 5, 0, 0, 6, 7]]
    assert params["pdconn"]["first_blocks"] == [2]
    assert pool.pinned() == [2, 3]
    settle(lending, pool)
    assert not pool.pinned()
