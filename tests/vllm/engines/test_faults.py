"""Engines that are killed, stopped and restarted while they hand over: no wrong token, ever.

Real engines, real NIXL.  The decode engine reads over TCP, since only there the data
of a stopped prefill engine comes late; see ``faulty`` for the engines' parts.

A prefill engine dies once, amid 32 other requests, and every request that had to do
with it is looked at: one that had its ticket only, one in the middle of its read, one
that had pulled and was generating.  That the comparison notices a wrong byte is shown
in ``test_requests``, by engines that flip a byte.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdconn.protocol.messages import Confirmed, Granted, Renew
from pdconn.tools.lab.compare_answers import Answer
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.lab_errors import RequestRefused
from tests.vllm.engines.engines import Expected, Prompt
from tests.vllm.engines.faulty import (
    CLAIM_TIMEOUT_S,
    DELAY_S,
    LEASE_S,
    OTHERS,
    PREFILL,
    Asked,
    Beside,
    Fleet,
    News,
    ask,
    ask_during_stop,
    fleet_of,
)
from tests.vllm.engines.tap import Tap, Ticket

AT_ONCE_S = 0.9 * CLAIM_TIMEOUT_S
"""What needed no time-out; nearly all of it is the machine's other work."""
GIVEN_UP_S = 4 * LEASE_S
"""When decode must have given up a lender that is silent."""
WAIT_S = 60.0
_GONE = rf"(PeerLost: |the claim expired |{PREFILL} at \S+ side channel: )"


@pytest.fixture(scope="module")
def fleet(model: Path, work: Path, expected: Expected) -> Iterator[Fleet]:
    with fleet_of(model, work, expected) as engines:
        yield engines


@pytest.fixture
def prefill(fleet: Fleet) -> Engine:
    """Alive, and known to both decode engines."""
    for engine in (fleet.prefill, fleet.decode, fleet.failing):
        fleet.revive(engine)
    for decode in (fleet.decode, fleet.failing):
        assert fleet.hands_over(decode)
    return fleet.prefill


def right(fleet: Fleet, asked: Asked) -> bool:
    assert isinstance(asked.outcome, Answer), asked.outcome
    problem = fleet.wrong(asked.prompt, asked.outcome)
    assert problem is None, problem
    return True


def refused(asked: Asked) -> bool:
    assert isinstance(asked.outcome, RequestRefused), asked.outcome
    return asked.outcome.status == 500


# Stopped, and going on


@pytest.mark.parametrize(
    "given_up",
    [
        pytest.param(False, id="soon", marks=pytest.mark.matrix),
        pytest.param(True, id="when it is given up"),
    ],
)
def test_a_prefill_stopped_past_its_lease_amid_a_read_corrupts_nothing(
    fleet: Fleet, prefill: Engine, given_up: bool
) -> None:
    """Its data comes when it goes on, into blocks that must have no owner by then.

    While it is stopped it is unknown whether it ever goes on, so its request must
    not wait for that.
    """
    news = News(fleet.decode)
    with Tap(prefill) as tap, Beside(fleet) as beside, ThreadPoolExecutor() as pool:
        try:
            asked = ask_during_stop(fleet, tap, pool, 60)
            time.sleep(LEASE_S + 1)
            if given_up:
                wait([asked], GIVEN_UP_S)
        finally:
            went_on = time.monotonic()
            prefill.resume()
        late = asked.result(WAIT_S)
    assert right(fleet, late)
    # Neither side died, so the read ended because its data came.
    assert re.search(r"pull of \S+ failed: (?!PeerLost)", news())
    assert beside.wrong() == []
    assert beside.answered >= 3 * OTHERS
    assert fleet.serves(prefill)
    assert fleet.hands_over(fleet.decode)
    assert fleet.used(prefill, 2 * LEASE_S) == 0.0
    assert fleet.used(fleet.decode, LEASE_S) == 0.0
    if given_up:
        assert late.ended < went_on


@pytest.mark.matrix
def test_a_prefill_stopped_before_or_after_a_pull_is_not_waited_for(
    fleet: Fleet, prefill: Engine
) -> None:
    """A request with only a ticket gives up its claim; one that has pulled goes on."""
    prompts = [fleet.prompt() for _ in range(3)]
    tickets = [fleet.lent(prompt) for prompt in prompts]
    with Tap(prefill) as tap, ThreadPoolExecutor() as pool:
        done = tap.at(Confirmed)
        generating = pool.submit(ask, fleet.decode, prompts[0], tap.over(tickets[0]), 400)
        assert done.wait(WAIT_S)
        prefill.pause()
        stopped = time.monotonic()
        try:
            recomputing = pool.submit(ask, fleet.decode, prompts[1], tickets[1])
            failing = pool.submit(ask, fleet.failing, prompts[2], tickets[2])
            after = generating.result(WAIT_S)
            assert right(fleet, recomputing.result(WAIT_S))
            assert refused(failing.result(WAIT_S))
        finally:
            prefill.resume()
    assert right(fleet, after)
    assert after.ended > stopped
    assert fleet.hands_over(fleet.decode)
    assert fleet.hands_over(fleet.failing)
    assert fleet.used(prefill, 2 * LEASE_S) == 0.0


def test_a_decode_stopped_past_its_lease_believes_no_reused_block(
    fleet: Fleet, prefill: Engine
) -> None:
    """Its read is posted when prefill has long filled those blocks with other prompts."""
    prompt = fleet.prompt()
    ticket, news = fleet.lent(prompt), News(fleet.failing)
    with Tap(prefill) as tap, ThreadPoolExecutor() as pool:
        granted = tap.at(Granted)
        asked = pool.submit(ask, fleet.failing, prompt, tap.over(ticket))
        fleet.await_blocks(fleet.failing)
        assert granted.wait(WAIT_S)
        time.sleep(DELAY_S / 4)  # the read waits by now
        fleet.failing.pause()
        try:
            assert fleet.used(prefill, 3 * LEASE_S) == 0.0
            for _ in range(3):
                assert fleet.serves(prefill)
                Client(prefill.url).complete(fleet.prompt(2000), 1)
        finally:
            fleet.failing.resume()
        assert refused(asked.result(WAIT_S))
    assert re.search(r"pull of \S+ failed: ", news())
    assert fleet.hands_over(fleet.failing)


# Killed


@dataclass(frozen=True)
class Death:
    """A prefill engine was killed; the requests that used it, and how they ended."""

    killed: float
    before_recomputing: Asked
    before_failing: Asked
    during_recomputing: Asked
    during_failing: Asked
    after: Asked
    beside: Beside
    logged_by_decode: str
    logged_by_failing: str
    left_over: Ticket
    left_over_prompt: tuple[int, ...]


@pytest.fixture(scope="module")
def death(fleet: Fleet) -> Death:
    """One death amid 32 other requests.

    ``decode`` has a read in the air, which hangs since prefill is stopped first;
    ``failing`` has one that waits to be posted.
    """
    fleet.revive(fleet.prefill)
    prefill, news, failing_news = fleet.prefill, News(fleet.decode), News(fleet.failing)
    with (
        Tap(prefill) as to_generating,
        Tap(prefill) as to_decode,
        Tap(prefill) as to_failing,
        Beside(fleet) as beside,
        ThreadPoolExecutor() as pool,
    ):

        def give(engine: Engine, tap: Tap, kind: type, num_tokens: int = 24) -> Future[Asked]:
            """Ask, and wait for the message that tells how far it came."""
            prompt, passed = fleet.prompt(), tap.at(kind)
            ticket = tap.over(fleet.lent(prompt))
            asked = pool.submit(ask, engine, prompt, ticket, num_tokens)
            assert passed.wait(WAIT_S)
            return asked

        early = [fleet.prompt() for _ in range(3)]
        tickets = [fleet.lent(prompt) for prompt in early]
        generating = give(fleet.decode, to_generating, Confirmed, 400)
        waiting: list[Future[Asked]] = []
        renewed = to_decode.at(Renew)
        hanging = ask_during_stop(
            fleet,
            to_decode,
            pool,
            24,
            first=lambda: waiting.append(give(fleet.failing, to_failing, Granted)),
        )
        assert renewed.wait(WAIT_S)  # so its read was posted
        killed = time.monotonic()  # what dies takes a while to be gone, and is missed before
        prefill.kill_command()
        before_recomputing = ask(fleet.decode, early[0], tickets[0])
        before_failing = ask(fleet.failing, early[1], tickets[1])
        during_failing, during_recomputing = waiting[0].result(WAIT_S), hanging.result(WAIT_S)
        generated = generating.result(WAIT_S)
    return Death(
        killed,
        before_recomputing,
        before_failing,
        during_recomputing,
        during_failing,
        generated,
        beside,
        news(),
        failing_news(),
        tickets[2],
        early[2],
    )


def test_killed_before_the_read_the_prompt_is_recomputed(fleet: Fleet, death: Death) -> None:
    assert right(fleet, death.before_recomputing)
    assert death.before_recomputing.took_s < AT_ONCE_S
    assert fleet.serves(fleet.decode)


def test_killed_before_the_read_the_request_fails_and_the_log_says_why(
    fleet: Fleet, death: Death
) -> None:
    assert refused(death.before_failing)
    assert death.before_failing.took_s < AT_ONCE_S
    side_channel = rf"{PREFILL} at 127\.0\.0\.1:{fleet.prefill.spec.side_channel_port}"
    assert re.search(
        rf"pull of \S+ failed: {side_channel}: side channel: ", death.logged_by_failing
    )
    assert fleet.serves(fleet.failing)


def test_killed_amid_a_hanging_read_the_prompt_is_recomputed(fleet: Fleet, death: Death) -> None:
    assert right(fleet, death.during_recomputing)
    assert death.during_recomputing.ended > death.killed
    # The end of the side channel, or of the read; where the machine is slow the claim runs out
    # before either is seen.
    assert re.search(rf"pull of \S+ failed: {_GONE}", death.logged_by_decode)


def test_killed_before_a_late_read_is_posted_the_request_fails(fleet: Fleet, death: Death) -> None:
    assert refused(death.during_failing)
    assert death.during_failing.ended > death.killed
    assert re.search(rf"pull of \S+ failed: {_GONE}", death.logged_by_failing)


def test_killed_after_the_pull_the_answer_goes_on(fleet: Fleet, death: Death) -> None:
    assert right(fleet, death.after)
    assert death.after.ended > death.killed
    assert fleet.serves(fleet.decode)


def test_requests_beside_a_death_are_all_answered_right(fleet: Fleet, death: Death) -> None:
    assert death.beside.wrong() == []
    assert death.beside.answered >= 3 * OTHERS
    assert fleet.used(fleet.decode, LEASE_S) == 0.0


# Restarted


def test_a_restarted_prefill_refuses_old_tickets_at_once_and_serves_new_ones(
    fleet: Fleet, death: Death
) -> None:
    """Same host, same ports, same engine id: only the incarnation tells."""
    fleet.revive(fleet.prefill)
    news = News(fleet.decode)
    old = ask(fleet.decode, death.left_over_prompt, death.left_over)
    assert right(fleet, old)
    assert re.search(r"pull of \S+ failed: .*incarnation: theirs \w+, ours \w+", news())
    assert old.took_s < AT_ONCE_S
    began = time.monotonic()
    assert fleet.hands_over(fleet.decode)
    assert fleet.hands_over(fleet.failing)
    assert time.monotonic() - began < AT_ONCE_S + DELAY_S


@pytest.mark.matrix
def test_a_decode_killed_again_and_again_costs_prefill_nothing(
    fleet: Fleet, prefill: Engine
) -> None:
    """Killed as its claims are granted, amid its reads' delay, and as they are posted.

    Over UCX's default transports, here CMA, where prefill takes no part in a read.
    Over TCP it answers in software, and UCX 1.23 may abort the process that cannot
    send its answer: 3 of 11 readers killed amid a READ took their lender along.
    """
    for wait_s in (0.0, DELAY_S / 2, DELAY_S):
        fleet.revive(fleet.failing)
        assert fleet.hands_over(fleet.failing)
        prompts = [fleet.prompt(400) for _ in range(6)]
        with Tap(prefill) as tap, ThreadPoolExecutor() as pool:
            tickets = [tap.over(fleet.lent(prompt)) for prompt in prompts]
            granted = tap.at(Granted)
            asked = [
                pool.submit(ask, fleet.failing, *each, 1500)  # the served ones still generate
                for each in zip(prompts, tickets, strict=True)
            ]
            assert granted.wait(WAIT_S)
            time.sleep(wait_s)
            fleet.failing.kill_command()
            for each in asked:
                assert isinstance(each.exception(WAIT_S), OSError)
        prefill.check_alive()
        assert fleet.serves(prefill)
        assert fleet.hands_over(fleet.decode)
    assert fleet.used(prefill, 2 * LEASE_S) == 0.0


# Asked to stop


def test_sigterm_amid_20_hand_overs_loses_none(fleet: Fleet, prefill: Engine) -> None:
    """An engine with `--shutdown-timeout` finishes what it has, and stays until it is read."""
    prompts = [fleet.prompt(300 + number) for number in range(20)]
    before = Client(fleet.decode.url).metrics()["pdconn:pulls_total"]
    half_lent, lent = threading.Event(), itertools.count(1)

    def hand_over(prompt: Prompt) -> Asked:
        ticket = fleet.lent(prompt)
        if next(lent) == 10:
            half_lent.set()
        return ask(fleet.decode, prompt, ticket, 4)

    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(hand_over, prompt) for prompt in prompts]
        assert half_lent.wait(WAIT_S)
        prefill.ask_to_stop()
        assert all(right(fleet, each.result(WAIT_S)) for each in asked)
    end = prefill.stop()
    assert end is not None
    assert (end.exit_code, end.killed) == (0, ())
    pulled = Client(fleet.decode.url).metrics()["pdconn:pulls_total"] - before
    assert pulled == 20, "some were computed again: their leases were gone"


@pytest.mark.matrix
def test_a_stopping_prefill_waits_for_a_ticket_that_is_still_on_its_way(
    fleet: Fleet, prefill: Engine
) -> None:
    """Between the router's two requests nothing runs on either engine."""
    prompt = fleet.prompt()
    ticket, before = fleet.lent(prompt), Client(fleet.decode.url).metrics()["pdconn:pulls_total"]
    prefill.ask_to_stop()
    time.sleep(LEASE_S / 2)
    assert right(fleet, ask(fleet.decode, prompt, ticket, 4))
    assert Client(fleet.decode.url).metrics()["pdconn:pulls_total"] - before == 1
    end = prefill.stop()
    assert end is not None
    assert (end.exit_code, end.killed) == (0, ())
    assert "pdconn: draining: leases=1" in prefill.log.read_text(encoding="utf-8")
