"""Requests with streams, and what a router sees of them: stated once, for fake engines and vLLM.

``test_fake_streams`` gives these requests to the fake engines of the router's tests, and
``tests/vllm/engines/streams/test_fake_engines`` to a pair of real ones.  Both have to show what
stands here; so a fake is neither kinder nor stricter than vLLM.

What decode says is read where a router reads it: the status, ``kv_transfer_params``, and the
counters of pulls on its Prometheus page.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw

from pdconn.protocol.early import EarlyTicket
from pdconn.router.fleet.lenders import is_one_boot, lender_of
from pdconn.router.fleet.prometheus_page import all_samples
from pdconn.router.fleet.pull_counts import FAILED, PULL_CAUSES, PULLS
from pdconn.router.handover.tries import may_repeat
from pdconn.router.openai.bodies import RETURN_MODEL, find_ticket, lend_params

Counted = frozenset[str]


def _gone(why: str) -> Counted:
    return frozenset({"pdconn:tickets_gone_total", f"pdconn:pulls_{why}_total"})


PULLED, NOTHING = frozenset({PULLS}), frozenset[str]()
"""NOTHING: there is nothing to pull."""
USED = frozenset({FAILED, "pdconn:pulls_refused_consumed_total"})
MISTAKEN = frozenset({"pdconn:tickets_mistaken_total"})
UNKNOWN, ABORTED = _gone("refused_unknown"), _gone("refused_aborted")
UNREACHABLE = _gone("unreachable")
ABORTED_PULL = frozenset({FAILED, "pdconn:pulls_refused_aborted_total"})
READ = frozenset({PULLS, FAILED, *(one.metric for one in PULL_CAUSES)})

NUM_TOKENS = 6
LONG, SHORT = 1500, 200


@dataclass(frozen=True)
class Saw:
    """What a router sees of one request at decode.

    Attributes:
        is_right: the answer is that of an engine that computes the prompt.
        has_waited: half as long as decode waits for a stream, or longer.
        counted: the counters that have grown at decode.
    """

    status: int
    is_right: bool = True
    has_ticket: bool = False
    has_waited: bool = False
    counted: Counted = PULLED


@dataclass(frozen=True)
class SawTicket:
    """What a router reads of prefill's answer.

    Attributes:
        names_boot: the boot that lends can be read in it, and is that of earlier tickets.
        may_repeat: a body with it may be sent twice.
    """

    status: int = 200
    names_boot: bool = True
    may_repeat: bool = True


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, fake or real.

    Attributes:
        policy: decode's ``kv_load_failure_policy``.
        parks_s: how long decode waits for a stream that does not come.
        is_right: whether decode's answer to a prompt is what one engine alone answers.
        forget: decode forgets the prompts that it holds.
        is_free: prefill lends nothing.
    """

    session: aiohttp.ClientSession
    prefill: str
    decode: str
    model: str
    policy: str
    parks_s: float
    is_right: Callable[[Sequence[int], bytes], Awaitable[bool]]
    forget: Callable[[], Awaitable[None]]
    is_free: Callable[[], Awaitable[bool]]

    async def post(
        self, engine: str, prompt: Sequence[int], params: Any = None, **more: Any
    ) -> tuple[int, bytes]:
        body = {"model": self.model, "prompt": list(prompt), "max_tokens": NUM_TOKENS}
        shown = {"temperature": 0.0, "logprobs": 5, "return_tokens_as_token_ids": True}
        body |= shown | {"return_token_ids": True, "ignore_eos": True} | more
        if params is not None:
            body["kv_transfer_params"] = params
        async with self.session.post(engine + "/v1/completions", json=body) as response:
            return response.status, await response.read()

    async def ask_prefill(self, prompt: Sequence[int], early: EarlyTicket | None) -> Raw | None:
        """The ticket, checked."""
        ours = {} if early is None else {"pdconn": {"stream": early.stream}}
        params = {**lend_params(), **ours}
        status, whole = await self.post(self.prefill, prompt, params, max_tokens=1)
        ticket = find_ticket(whole)
        assert ticket is not None
        lender = lender_of(ticket)
        is_named = lender is not None and (early is None or is_one_boot(early, lender))
        assert SawTicket(status, is_named, may_repeat(ticket)) == SawTicket()
        return ticket

    async def ask_decode(self, prompt: Sequence[int], params: Any) -> Saw:
        """Decode's answer; it alone is asked meanwhile."""
        before, began_s = await self.counts(), time.monotonic()
        saw = await self.ask_once(prompt, params, began_s)
        return replace(saw, counted=await self.counted_since(before))

    async def ask_once(self, prompt: Sequence[int], params: Any, began_s: float) -> Saw:
        """Decode's answer, whatever it counts."""
        status, whole = await self.post(self.decode, prompt, params)
        waited_s = time.monotonic() - began_s
        is_right = status == 200 and await self.is_right(prompt, whole)
        return Saw(status, is_right, find_ticket(whole) is not None, waited_s > self.parks_s / 2)

    async def ask_both(
        self, prompt: Sequence[int], early: EarlyTicket, num: int = 1
    ) -> tuple[Raw | None, list[Saw], dict[str, float]]:
        """Prefill's ticket, decode's answers, and what decode has counted for all of them."""
        before, began_s = await self.counts(), time.monotonic()
        decode = (self.ask_once(prompt, early.to_params(), began_s) for _ in range(num))
        ticket, *saw = await asyncio.gather(self.ask_prefill(prompt, early), *decode)
        after = await self.counts()
        return ticket, list(saw), {name: after[name] - before[name] for name in READ}

    async def give_back(self, prompt: Sequence[int], ticket: Raw) -> None:
        """As the router returns a ticket."""
        status, _ = await self.post(
            self.decode, prompt, msgspec.json.decode(ticket), model=RETURN_MODEL
        )
        assert status == 404

    async def early(self) -> EarlyTicket:
        """An early ticket, after an ordinary hand-over, which says where prefill lends."""
        prompt = fresh_prompt(SHORT)
        ticket = await self.ask_prefill(prompt, None)
        assert ticket is not None
        saw = await self.ask_decode(prompt, msgspec.json.decode(ticket))
        assert saw == Saw(200)
        lender = lender_of(ticket)
        assert lender is not None
        return replace(lender, stream=secrets.token_hex(16))

    async def counts(self) -> dict[str, float]:
        """Decode's counters, as of its last step: it makes one more."""
        await self.post(self.decode, (5, 6, 7), max_tokens=1)
        return await self.shown()

    async def shown(self) -> dict[str, float]:
        """Decode's counters as its page has them now."""
        async with self.session.get(self.decode + "/metrics") as response:
            samples = all_samples(await response.text())
        counted = dict.fromkeys(READ, 0.0)
        for one in samples:
            if one.name in counted:
                counted[one.name] += one.value
        return counted

    async def counted_since(self, before: dict[str, float]) -> Counted:
        """The counters that have grown since."""
        after = await self.counts()
        return frozenset(name for name in READ if after[name] > before[name])


_seeds = iter(range(3, 1 << 20))


def fresh_prompt(length: int) -> tuple[int, ...]:
    """A prompt that no engine holds any of."""
    seed = next(_seeds)
    return tuple(4 + (seed * 7919 + 31 * at * (seed % 13 + 1)) % 900 for at in range(length))


# The scenarios

Act = Callable[[Pair, EarlyTicket], Awaitable[None]]


async def prefill_is_asked_at_the_same_time(pair: Pair, early: EarlyTicket) -> None:
    prompt = fresh_prompt(LONG)
    _, [saw], counted = await pair.ask_both(prompt, early)
    assert (saw, counted[PULLS]) == (Saw(200), 1)


async def prefill_is_never_asked(pair: Pair, early: EarlyTicket) -> None:
    saw = await pair.ask_decode(fresh_prompt(SHORT), early.to_params())
    assert saw == Saw(200, has_waited=True, counted=UNKNOWN)


async def prefill_has_answered_before(pair: Pair, early: EarlyTicket) -> None:
    prompt = fresh_prompt(SHORT)
    await pair.ask_prefill(prompt, early)
    assert await pair.ask_decode(prompt, early.to_params()) == Saw(200)


async def prefill_is_asked_and_its_client_leaves(pair: Pair, early: EarlyTicket) -> None:
    """It is aborted, or has ended before and lends: decode notices either at once."""
    prompt = fresh_prompt(LONG)
    before, began_s = await pair.counts(), time.monotonic()
    prefill = asyncio.create_task(pair.ask_prefill(prompt, early))
    decode = asyncio.create_task(pair.ask_once(prompt, early.to_params(), began_s))
    await asyncio.sleep(0.1)
    prefill.cancel()
    assert await decode == Saw(200)
    counted = await pair.counted_since(before)
    # Its pull fails if decode has blocks already; it computes then, whatever the policy says.
    assert counted in (PULLED, ABORTED, ABORTED_PULL), counted
    await asyncio.wait({prefill})


async def prefill_s_client_has_left(pair: Pair, early: EarlyTicket) -> None:
    """The same, and decode comes later."""
    prompt = fresh_prompt(LONG)
    prefill = asyncio.create_task(pair.ask_prefill(prompt, early))
    await asyncio.sleep(0.1)
    prefill.cancel()
    await asyncio.wait({prefill})
    await asyncio.sleep(1.0)
    saw = await pair.ask_decode(prompt, early.to_params())
    assert saw in (Saw(200), Saw(200, counted=ABORTED))


async def prefill_s_client_leaves_before_its_body_has_arrived(
    pair: Pair, early: EarlyTicket
) -> None:
    """Its engine never hears of the request."""
    host, port = pair.prefill.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: 999\r\n\r\n{{".encode())
    await writer.drain()
    writer.close()
    await prefill_is_never_asked(pair, early)


async def the_ticket_is_of_another_boot(pair: Pair, early: EarlyTicket) -> None:
    other = replace(early, incarnation="0" * len(early.incarnation))
    saw = await pair.ask_decode(fresh_prompt(SHORT), other.to_params())
    assert saw == Saw(200, counted=UNREACHABLE)


async def two_requests_have_it(pair: Pair, early: EarlyTicket) -> None:
    """Each is answered right; a second one pulls as well, or computes."""
    prompt = fresh_prompt(LONG)
    _, saw, counted = await pair.ask_both(prompt, early, num=2)
    assert saw == [Saw(200), Saw(200)]
    assert counted[PULLS] >= 1
    assert counted[FAILED] == 0


async def its_ordinary_ticket_comes_later(pair: Pair, early: EarlyTicket) -> None:
    """With another request: it is used, as any ticket that was sent to decode twice."""
    prompt = fresh_prompt(LONG)
    ticket, [saw], counted = await pair.ask_both(prompt, early)
    assert (saw, counted[PULLS]) == (Saw(200), 1)
    assert ticket is not None
    await pair.forget()
    before, began_s = await pair.counts(), time.monotonic()
    again = await pair.ask_once(prompt, msgspec.json.decode(ticket), began_s)
    if pair.policy == "recompute":
        assert again == Saw(200)
    else:
        assert again == Saw(500, is_right=False)
        # As a warm-up reads it, which sends such an engine nothing more.
        assert (await pair.shown())[FAILED] == before[FAILED] + 1
    assert await pair.counted_since(before) == USED


async def the_prompt_has_one_token(pair: Pair, early: EarlyTicket) -> None:
    """Decode does not wait for prefill, and what that lends later is free."""
    prompt = fresh_prompt(1)
    saw = await pair.ask_decode(prompt, early.to_params())
    assert saw == Saw(200, counted=NOTHING)
    await pair.ask_prefill(prompt, early)


async def the_prompt_is_another_one(pair: Pair, early: EarlyTicket) -> None:
    theirs = fresh_prompt(SHORT)
    ticket = await pair.ask_prefill(theirs, early)
    saw = await pair.ask_decode(fresh_prompt(SHORT), early.to_params())
    assert saw == Saw(200, counted=MISTAKEN)
    assert ticket is not None
    await pair.give_back(theirs, ticket)


async def decode_s_client_leaves(pair: Pair, early: EarlyTicket) -> None:
    """Before prefill is asked: what is lent then has no reader, and is free at once."""
    prompt = fresh_prompt(SHORT)
    decode = asyncio.create_task(pair.post(pair.decode, prompt, early.to_params()))
    await asyncio.sleep(1.0)
    decode.cancel()
    await asyncio.wait({decode})
    await asyncio.sleep(1.0)
    await pair.ask_prefill(prompt, early)


SCENARIOS: tuple[Act, ...] = (
    prefill_is_asked_at_the_same_time,
    prefill_is_never_asked,
    prefill_has_answered_before,
    prefill_is_asked_and_its_client_leaves,
    prefill_s_client_has_left,
    prefill_s_client_leaves_before_its_body_has_arrived,
    the_ticket_is_of_another_boot,
    two_requests_have_it,
    its_ordinary_ticket_comes_later,
    the_prompt_has_one_token,
    the_prompt_is_another_one,
    decode_s_client_leaves,
)


async def show(scenario: Act, pair: Pair) -> None:
    """Play a scenario; at the end nothing is lent."""
    await pair.forget()
    await scenario(pair, await pair.early())
    assert await pair.is_free()


@asynccontextmanager
async def asking() -> AsyncIterator[aiohttp.ClientSession]:
    """A client of engines."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120.0)) as session:
        yield session
