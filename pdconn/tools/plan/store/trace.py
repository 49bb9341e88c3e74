"""Traces of requests: lines of a file, each read strictly, as :class:`TracedRequest`.

Three formats are read; the first line says which:

- **Mooncake's**, JSON: ``timestamp`` (ms), ``input_length``, ``output_length``, and ``hash_ids``,
  one for every 512 tokens of the prompt and the rest.
- **The access log of** ``pdconn proxy`` with ``--log-format json --log-blocks``, JSON:
  ``prompt_tokens``, and ``prompt_blocks``, digests of the prompt's whole blocks.  Other lines of
  the log are skipped and counted.
- **vLLM's KV events**: base64 of a published batch.

An engine publishes blocks that it has *computed*, so events are requests behind its own cache:
what it held is what lies before the first block of a chain.  Blocks that follow on one another are
one request; one that comes alone is of the answer::

    after 9: blocks 10 11 12     held 1 to 9, prompt 10 to 12
    after 12: block 13           answer
    after 13: blocks 14 15       the next turn: held 1 to 13
    after 9: blocks 10 11 12     the engine has lost them, and another request has computed them
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Annotated, ClassVar

import msgspec

from pdconn.router.prefix.block_digests import decode_blocks
from pdconn.router.prefix.groups import KINDS, Needs
from pdconn.router.prefix.kv_events import BadBatch, Batch, Cleared, Stored, decode_batch
from pdconn.tools.plan.forecast import MAX_PROMPT_TOKENS
from pdconn.tools.plan.plan_errors import ForecastError, shown
from pdconn.tools.plan.store.curve import TracedRequest
from transport.errors import FieldError

MAX_LINE = 64 << 20
"""Bytes of the longest line: a batch of events may be as long."""
MOONCAKE_BLOCK = 512
_OPEN_S = 60.0
"""Seconds without a further block after which a chain of events is over."""
_MOST_OPEN = 1 << 16
_OWN_MEDIA = ("gpu", "unknown")


class BadTrace(FieldError, ForecastError):
    """A line of a trace is invalid; ``field`` names the line, and the field in it."""

    show: ClassVar[Callable[[object], str]] = staticmethod(shown)


@dataclass(slots=True)
class TraceCounts:
    """Lines that were read, and lines and events that are of no request."""

    lines: int = 0
    skipped: int = 0


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_PROMPT_TOKENS)]
_Id = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _MooncakeLine(msgspec.Struct):
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    hash_ids: list[_Id]
    output_length: _Tokens = 0
    timestamp: float = 0.0


class _AccessLine(msgspec.Struct):
    prompt_blocks: str | None = None
    prompt_tokens: int | str | None = None
    time: str | None = None


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)
_ACCESS = msgspec.json.Decoder(_AccessLine)
_WRONG = re.compile(r"Expected (.+?)(?:, got .+?)?(?: - at `\$\.?(.*)`)?")
_STEP = re.compile(r"(\w+)|\[(\d+)\]")
_FORMATS = "a request with hash_ids, a line of pdconn proxy's JSON log, or base64 of KV events"


_Reader = Callable[[int, bytes], Iterator[TracedRequest]]
"""Reads a line, given its number."""


def read_trace(
    lines: Iterable[bytes], counts: TraceCounts, block_tokens: int = MOONCAKE_BLOCK
) -> Iterator[TracedRequest]:
    """The requests of a trace, in order.

    Args:
        block_tokens: of a block of Mooncake's format.

    Raises:
        BadTrace: a line cannot be read; it names the line and the field.
    """
    read: _Reader | None = None
    chains = EventChains(counts)
    for number, raw in enumerate(lines, 1):
        counts.lines += 1
        line = raw.strip()
        if not line:
            continue
        if len(line) > MAX_LINE:
            raise BadTrace(f"line {number}", f"at most {MAX_LINE} bytes", len(line))
        if read is None:
            readers: dict[str, _Reader] = {
                "mooncake": partial(_mooncake, block_tokens=block_tokens),
                "access": partial(_access, counts=counts),
                "events": chains.read_line,
            }
            read = readers[_form_of(number, line)]
        yield from read(number, line)
    yield from chains.close()


def _form_of(number: int, line: bytes) -> str:
    if not line.startswith(b"{"):
        _batch_of(line, number, _FORMATS)
        return "events"
    try:
        keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadTrace(f"line {number}", "JSON", str(error)) from error
    if "hash_ids" in keys:
        return "mooncake"
    if "logger" in keys or "prompt_blocks" in keys:
        return "access"
    raise BadTrace(f"line {number}", _FORMATS, sorted(keys))


def _batch_of(line: bytes, number: int, expected: str) -> Batch:
    try:
        return decode_batch(base64.b64decode(line, validate=True))
    except (binascii.Error, BadBatch) as error:
        raise BadTrace(f"line {number}", expected, line, str(error)) from error


def _undecodable(number: int, line: bytes, error: Exception) -> BadTrace:
    """The error of a line, with the field, and what the decoder expected there."""
    found = _WRONG.fullmatch(str(error))
    if found is None:
        return BadTrace(f"line {number}", str(error), line)
    where, seen = found[2] or "", msgspec.json.decode(line)
    for key, index in _STEP.findall(where):
        seen = seen[int(index)] if index else seen[key]
    return BadTrace(f"line {number} {where}".rstrip(), found[1].replace("`", ""), seen)


def _mooncake(number: int, line: bytes, block_tokens: int) -> Iterator[TracedRequest]:
    try:
        one = _MOONCAKE.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _undecodable(number, line, error) from error
    blocks = -(-one.input_length // block_tokens)
    if len(one.hash_ids) != blocks:
        expected = f"{blocks}, for input_length {one.input_length} in blocks of {block_tokens}"
        raise BadTrace(f"line {number} hash_ids", expected, len(one.hash_ids))
    at_s = one.timestamp / 1000
    yield TracedRequest(one.input_length, one.output_length, one.hash_ids, block_tokens, at_s)


def _access(number: int, line: bytes, counts: TraceCounts) -> Iterator[TracedRequest]:
    try:
        one = _ACCESS.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        counts.skipped += 1  # of another program, which shares the file
        return
    # Requests without a look-up have no digests, and those that failed may have no count.
    if one.prompt_blocks is None or not isinstance(one.prompt_tokens, int):
        counts.skipped += 1
        return
    yield _logged(number, one.prompt_blocks, one.prompt_tokens, one.time)


def _logged(number: int, blocks: str, tokens: int, time: str | None) -> TracedRequest:
    try:
        size, ids = decode_blocks(blocks)
    except ValueError as error:
        raise BadTrace(f"line {number} prompt_blocks", error, blocks) from error
    if not size * len(ids) <= tokens <= MAX_PROMPT_TOKENS or tokens < 1:
        expected = f"{max(1, size * len(ids))} to {MAX_PROMPT_TOKENS}, as prompt_blocks have them"
        raise BadTrace(f"line {number} prompt_tokens", expected, tokens)
    try:
        at_s = 0.0 if time is None else datetime.fromisoformat(time).timestamp()
    except ValueError as error:
        raise BadTrace(f"line {number} time", "a time in ISO 8601", time) from error
    return TracedRequest(tokens, 0, ids, size, at_s)


@dataclass(slots=True)
class _OpenChain:
    """Blocks that an engine has computed one after another."""

    at_s: float
    last_s: float
    held: int
    block_tokens: int
    prompt: int
    answer: int = 0


@dataclass(slots=True)
class EventChains:
    """Makes requests of KV events.

    Attributes:
        parents: of each block, by hash: the block before it, and the number of blocks up to it.
        open_chains: by the hash of their last block, the one that was extended last at the end.
        group: the KV cache group that is counted, once there is one.
    """

    counts: TraceCounts
    parents: dict[int, tuple[int | None, int]] = field(default_factory=dict)
    open_chains: dict[int, _OpenChain] = field(default_factory=dict)
    group: int | None = None
    has_group: bool = False

    def read_line(self, number: int, line: bytes) -> Iterator[TracedRequest]:
        """The requests that are over by a batch.

        Raises:
            BadTrace: it is no batch.
        """
        batch = _batch_of(line, number, "base64 of a batch of KV events")
        self.counts.skipped += batch.num_undecodable
        yield from self._ended(batch.ts - _OPEN_S)
        yield from self._apply(number, batch)

    def close(self) -> Iterator[TracedRequest]:
        """The requests that are open at the end."""
        yield from self._ended(float("inf"))

    def _apply(self, number: int, batch: Batch) -> Iterator[TracedRequest]:
        for event in batch.events:
            if isinstance(event, Cleared):
                yield from self.close()
            elif isinstance(event, Stored) and self._is_counted(event):
                if event.parent is not None and event.parent not in self.parents:
                    self.counts.skipped += 1  # what lies before it was not recorded
                else:
                    yield from self._store(event, batch.ts)

    def _is_counted(self, event: Stored) -> bool:
        """Whether it is of the engine's own memory, and of full attention: the others follow it."""
        if event.medium not in _OWN_MEDIA or not event.hashes:
            return False
        is_full = event.kind is None or KINDS.get(event.kind) is Needs.WHOLE
        if not self.has_group and is_full:
            self.group, self.has_group = event.group, True
        return self.has_group and event.group == self.group

    def _store(self, event: Stored, at_s: float) -> Iterator[TracedRequest]:
        parent, hashes = event.parent, event.hashes
        before = 0 if parent is None else self.parents[parent][1]
        chain = None if parent is None else self.open_chains.pop(parent, None)
        if chain is not None and chain.answer and len(hashes) > 1:
            assert parent is not None
            yield self._request(parent, chain)  # the next turn
            chain = None
        for depth, one in enumerate(hashes, before + 1):
            self.parents[one] = parent, depth
            parent = one
        if chain is None:
            chain = _OpenChain(at_s, at_s, before, event.block_tokens, len(hashes))
        elif len(hashes) == 1:
            chain.answer += 1
        else:
            chain.prompt += len(hashes)
        chain.last_s = at_s
        if hashes[-1] in self.open_chains:
            yield self._request(hashes[-1], self.open_chains.pop(hashes[-1]))
        self.open_chains[hashes[-1]] = chain
        if len(self.open_chains) > _MOST_OPEN:
            yield from self._ended(at_s, most=1)

    def _ended(self, before_s: float, most: int | None = None) -> Iterator[TracedRequest]:
        over: list[int] = []
        for last, chain in self.open_chains.items():
            if chain.last_s > before_s or (most is not None and len(over) == most):
                break  # they are in the order of their last blocks
            over.append(last)
        for last in over:
            yield self._request(last, self.open_chains.pop(last))

    def _request(self, last: int, chain: _OpenChain) -> TracedRequest:
        ids, at = [], last
        while True:
            ids.append(at)
            before, _ = self.parents[at]
            if before is None:
                break
            at = before
        ids.reverse()
        size = chain.block_tokens
        # A prompt hardly ends with a block, and only whole ones are published.
        tokens = min((chain.held + chain.prompt) * size + 1, MAX_PROMPT_TOKENS)
        return TracedRequest(tokens, chain.answer * size, ids, size, chain.at_s, chain.held * size)


def find_answers(requests: Iterable[TracedRequest]) -> dict[int, tuple[int, ...]]:
    """Ids of the blocks of answers, where a later prompt goes on from one, by number from 0.

    A trace has no ids of answers.  The first later prompt that begins with a prompt's whole blocks,
    and is as long as it and its answer, is taken for the next turn of the same conversation.
    """
    waiting: dict[int, tuple[int, int, int]] = {}
    found = {}
    for number, request in enumerate(requests):
        digest, size = 0, request.block_tokens
        for at in range(request.num_tokens // size):
            digest = hash((digest, request.ids[at]))
            known = waiting.get(digest)
            if known is not None and request.num_tokens >= known[2]:
                del waiting[digest]
                found[known[0]] = tuple(request.ids[known[1] : known[2] // size])
        if request.answer_tokens:
            until = request.num_tokens + request.answer_tokens
            waiting[digest] = number, request.num_tokens // size, until
            if len(waiting) > _MOST_OPEN:
                del waiting[next(iter(waiting))]
    return found


def with_answers(
    requests: Iterable[TracedRequest], answers: Mapping[int, tuple[int, ...]]
) -> Iterator[TracedRequest]:
    """The requests with the ids of their answers, as :func:`find_answers` has found them."""
    for number, request in enumerate(requests):
        ids = answers.get(number)
        if ids is None:
            yield request
        else:
            whole = request.ids[: request.num_tokens // request.block_tokens]
            yield replace(request, ids=[*whole, *ids])
