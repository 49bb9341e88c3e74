"""A golden prompt: one prompt through each pair, compared with prefill computing alone.

::

    prefill  the prompt, whole answer                         ► expected
    prefill  the prompt, one token, do_remote_decode          ► ticket: the advertised address
    decode   the prompt with that ticket, whole answer        ► seen; its pulls are counted

The prompt begins with a random word, so that no engine has it cached: an answer can be right only
if the KV cache arrived, or if decode computed the prompt itself; decode's counter of pulls
distinguishes the two.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from pdconn.router.fleet.engine_client import reason_of
from pdconn.router.openai.bodies import lend_params
from pdconn.tools.doctor.findings import Finding, fault, one_line, warning
from pdconn.tools.doctor.fleet.engines import EngineFacts
from pdconn.tools.doctor.fleet.traffic import Traffic, traffic_of
from pdconn.tools.openai.async_client import OK, AsyncClient
from pdconn.tools.openai.completions import (
    BrokenAnswer,
    Completion,
    Logprobs,
    completion_request,
    read_completion,
)

NUM_TOKENS = 16
MOST_PAIRS = 16
NEAR_TIE_NATS = 0.1
"""Nats within which two tokens may swap between two correct computations."""

_SENTENCE = "The quick brown fox jumps over the lazy dog and counts the stars of the evening. "
_REPEATS = 24
_NUM_IDS = 400
_LEAST_VOCAB = 500
_SPARE_TOKENS = NUM_TOKENS + 48
_BAD_REQUEST = 400
_ANSWER_TIMEOUT = aiohttp.ClientTimeout(total=120.0, sock_connect=10.0)
"""Time-out of a prompt, which may be queued; other pages use ``--timeout``."""
_METRIC_WAIT_S = 5.0
_METRIC_STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class GoldenAnswer:
    """Tokens (text pieces if the engine gives no ids), and the gap to the second best of each.

    ``gaps[i]`` is the log-probability of token ``i`` minus that of the next likely one; None if not
    reported.
    """

    tokens: tuple[Any, ...]
    gaps: tuple[float | None, ...] = ()
    ticket: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GoldenFacts:
    """The result of one pair.

    Attributes:
        error: the failed request and the reason.
        advertised: ``host:port`` in the ticket; None without a ticket.
        pulled: whether decode's counter of pulls rose; None without that counter.
        failed: whether its counter of failed pulls rose.
        engine_id: of the engine that issued the ticket.
    """

    prefill: str
    decode: str
    error: str | None = None
    expected: tuple[Any, ...] = ()
    seen: tuple[Any, ...] = ()
    gaps: tuple[float | None, ...] = ()
    advertised: str | None = None
    pulled: bool | None = None
    failed: bool = False
    engine_id: str | None = None

    @property
    def position(self) -> int | None:
        """The first position at which the answers differ; None if they are equal."""
        for at, (ours, theirs) in enumerate(zip(self.expected, self.seen, strict=False)):
            if ours != theirs:
                return at
        return (
            None
            if len(self.expected) == len(self.seen)
            else min(len(self.expected), len(self.seen))
        )


def golden_prompt(nonce: str, max_model_len: int | None = None) -> str:
    """English text that begins with ``nonce``, short enough for a byte tokenizer."""
    room = _REPEATS if max_model_len is None else (max_model_len - _SPARE_TOKENS) // len(_SENTENCE)
    return f"{nonce}. {_SENTENCE * max(1, min(_REPEATS, room))}"


def golden_ids(nonce: str, max_model_len: int | None = None) -> list[int]:
    """A prompt of token ids, for engines without a tokenizer."""
    source = random.Random(nonce)
    count = max(1, min(_NUM_IDS, (max_model_len or 2 * _NUM_IDS) - _SPARE_TOKENS))
    return [source.randrange(10, _LEAST_VOCAB) for _ in range(count)]


def golden_pairs(engines: Sequence[EngineFacts]) -> list[tuple[EngineFacts, EngineFacts]]:
    """Every pair; above ``MOST_PAIRS``, only as many as cover each engine once."""
    prefill = [one for one in engines if one.prefills and one.error is None]
    decode = [one for one in engines if one.decodes and one.error is None]
    if not prefill or not decode:
        return []
    if len(prefill) * len(decode) <= MOST_PAIRS:
        return [(p, d) for p in prefill for d in decode if p.url != d.url]
    count = max(len(prefill), len(decode))
    made = [(prefill[n % len(prefill)], decode[n % len(decode)]) for n in range(count)]
    return [(p, d) for p, d in made if p.url != d.url]


async def read_golden(
    prefill: EngineFacts,
    decode: EngineFacts,
    session: aiohttp.ClientSession,
    nonce: str,
) -> GoldenFacts:
    """Send the prompt through one pair."""
    shared = [m.name for m in prefill.models if m.name in {o.name for o in decode.models}]
    if not shared:
        return GoldenFacts(prefill.url, decode.url, "they serve no model in common")
    lengths = [m.max_model_len for m in prefill.models if m.name == shared[0]]
    try:
        body, expected = await _alone(session, prefill.url, shared[0], nonce, lengths[0])
        before = await _traffic(session, decode.url)
        asking = {**body, "max_tokens": 1, "kv_transfer_params": lend_params()}
        ticket = (await _ask(session, prefill.url, asking)).ticket
        if not ticket or not ticket.get("remote_host"):
            return GoldenFacts(prefill.url, decode.url, f"{prefill.url} returned no ticket")
        advertised = f"{ticket['remote_host']}:{ticket.get('remote_port')}"
        seen = await _ask(session, decode.url, {**body, "kv_transfer_params": dict(ticket)})
        after = await _traffic(session, decode.url)
        waited = 0.0
        while after.pulls == before.pulls and after.failed == before.failed:
            if waited >= _METRIC_WAIT_S or not after.known:
                break
            await asyncio.sleep(_METRIC_STEP_S)
            waited += _METRIC_STEP_S
            after = await _traffic(session, decode.url)
    except (aiohttp.ClientError, OSError, GoldenRefused) as error:
        return GoldenFacts(prefill.url, decode.url, one_line(reason_of(error)))
    return GoldenFacts(
        prefill.url,
        decode.url,
        None,
        expected.tokens,
        seen.tokens,
        expected.gaps,
        advertised,
        pulled=after.pulls > before.pulls if after.known else None,
        failed=after.failed > before.failed,
        engine_id=_id_of(ticket),
    )


def _id_of(ticket: Mapping[str, Any]) -> str | None:
    found = ticket.get("remote_engine_id")
    return found if isinstance(found, str) else None


class GoldenRefused(Exception):
    """An engine did not answer a golden prompt with tokens; ``status`` is the HTTP status."""

    def __init__(self, message: str, status: int = OK) -> None:
        super().__init__(message)
        self.status = status


async def _alone(
    session: aiohttp.ClientSession, url: str, model: str, nonce: str, max_model_len: int | None
) -> tuple[dict[str, Any], GoldenAnswer]:
    """The request, and prefill's answer; with token ids if it accepts no text."""
    prompt = golden_prompt(nonce, max_model_len)
    body = completion_request(model, prompt, NUM_TOKENS, logprobs=2)
    try:
        return body, await _ask(session, url, body)
    except GoldenRefused as error:
        if error.status != _BAD_REQUEST:
            raise
    body["prompt"] = golden_ids(nonce, max_model_len)
    return body, await _ask(session, url, body)


async def _ask(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> GoldenAnswer:
    client = AsyncClient(url, session)
    async with client.post_completion(json.dumps(body), timeout=_ANSWER_TIMEOUT) as response:
        raw = await response.read()
    if response.status != OK:
        reported = one_line(raw.decode(errors="replace"), 120)
        raise GoldenRefused(f"{url} answered {response.status}: {reported}", response.status)
    try:
        return golden_answer(read_completion(raw))
    except BrokenAnswer as error:
        raise GoldenRefused(f"{url} gave no answer of vLLM's form: {one_line(error)}") from error


def golden_answer(completion: Completion) -> GoldenAnswer:
    """Tokens, gaps and ticket of one completion.

    Raises:
        BrokenAnswer: the completion has no choice.
    """
    if not completion.choices:
        raise BrokenAnswer("it has no choice")
    choice = completion.choices[0]
    logprobs = choice.logprobs or Logprobs()
    tokens = choice.token_ids or logprobs.tokens or [choice.text]
    gaps = tuple(_gap(top) for top in logprobs.top_logprobs or ())
    return GoldenAnswer(tuple(tokens), gaps, completion.kv_transfer_params)


def _gap(top: Mapping[str, float] | None) -> float | None:
    values = sorted((top or {}).values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else None


async def _traffic(session: aiohttp.ClientSession, url: str) -> Traffic:
    return traffic_of((await AsyncClient(url, session).get_page("/metrics")).text)


def seen_golden(facts: GoldenFacts) -> str:
    """One line about a pair."""
    pair = f"{facts.decode} from {facts.prefill}"
    if facts.error is not None:
        return f"{pair}: {facts.error}"
    how = {True: "pulled", False: "not pulled", None: "pulls not counted"}[facts.pulled]
    equal = "equal" if facts.position is None else f"differ at {facts.position}"
    return f"{pair}: {len(facts.seen)} tokens {equal}, {how}, ticket names {facts.advertised}"


def judge_golden(pairs: Sequence[GoldenFacts]) -> Iterator[Finding]:
    """Findings about pairs whose answer is wrong, or did not come from a pull."""
    for one in pairs:
        subject = f"{one.decode} from {one.prefill}"
        if one.error is not None:
            remedy = (
                "read the logs of both engines; prefill needs pdconn as kv_producer or kv_both "
                "in its --kv-transfer-config"
            )
            yield fault("golden.failed", subject, one.error, remedy)
            continue
        yield from _tokens(subject, one)
        yield from _pulled(subject, one)


def _tokens(subject: str, one: GoldenFacts) -> Iterator[Finding]:
    at = one.position
    if at is None:
        return
    ours = one.expected[at] if at < len(one.expected) else "nothing"
    theirs = one.seen[at] if at < len(one.seen) else "nothing"
    message = f"token {at}: expected {ours!r} as prefill alone, got {theirs!r}"
    gap = one.gaps[at] if at < len(one.gaps) else None
    if gap is not None and gap < NEAR_TIE_NATS:
        message += f"; the two likeliest tokens there differ by {gap:.3f} nats, a near tie"
        remedy = "run it again: rounding differs between batches and engines"
        yield warning("golden.near-tie", subject, message, remedy)
        return
    remedy = (
        'compare weights and dtype of both; set "verify": "always" on both to tell wrong bytes '
        "from a wrong model"
    )
    yield fault("golden.tokens", subject, message, remedy)


def _pulled(subject: str, one: GoldenFacts) -> Iterator[Finding]:
    if one.pulled:
        return
    if one.pulled is None and not one.failed:
        message = "decode counts no pulls, so it may have computed the prompt itself"
        remedy = "run pdconn on decode, and do not switch its metrics off (--disable-log-stats)"
        yield warning("golden.uncounted", subject, message, remedy)
        return
    why = "its pull failed" if one.failed else "it pulled nothing"
    message = f"decode answered, but {why}: it computed the prompt itself"
    remedy = "decode's log names the reason; docs/troubleshooting.md lists them"
    yield fault("golden.not-pulled", subject, message, remedy)
