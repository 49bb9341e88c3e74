"""The lines of a trace of Mooncake's, the prompts they stand for, and what could be reused.

A line names a prompt by ids of its blocks of 512 tokens; the last may be of a part of one.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TRACE_BLOCK = 512
"""Tokens that an id of the trace stands for."""
VOCABULARY = 50_000


class TraceError(ValueError):
    """A line that is not of a trace: which line and field, what was expected, what it is."""

    def __init__(self, line: int, field: str, expected: str, got: object) -> None:
        self.line, self.field, self.expected, self.got = line, field, expected, got
        super().__init__(f"line {line}: {field}: expected {expected}, got {got!r}")


@dataclass(frozen=True)
class Request:
    """One line: milliseconds since the trace began, tokens, and the ids of the prompt's blocks."""

    at_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def parse(lines: Iterable[str]) -> list[Request]:
    """All requests; blank lines are none."""
    return [_request(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _request(number: int, line: str) -> Request:
    try:
        fields = json.loads(line)
    except ValueError:
        raise TraceError(number, "line", "JSON", line.strip()[:80]) from None
    if not isinstance(fields, dict):
        raise TraceError(number, "line", "a JSON object", fields)

    def whole(field: str, least: int) -> int:
        value = fields.get(field)
        if type(value) is not int or value < least:
            raise TraceError(number, field, f"an integer of at least {least}", value)
        return value

    at_ms, tokens, answer = (
        whole("timestamp", 0), whole("input_length", 1), whole("output_length", 0)
    )  # fmt: skip
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or any(type(one) is not int or one < 0 for one in ids):
        raise TraceError(number, "hash_ids", "a list of integers of at least 0", ids)
    count = math.ceil(tokens / TRACE_BLOCK)
    if len(ids) != count:
        raise TraceError(number, "hash_ids", f"{count} ids for {tokens} tokens", len(ids))
    return Request(at_ms, tokens, answer, tuple(ids))


def scaled(tokens: int, block: int) -> int:
    """So many tokens of the trace, where an id stands for ``block`` tokens; 1 at least."""
    return max(1, math.ceil(tokens * block / TRACE_BLOCK))


def prompt(request: Request, block: int) -> list[int]:
    """The prompt: equal ids give equal tokens, different ids different ones."""
    tokens = [token for one in request.hash_ids for token in _block(one, block)]
    return tokens[: scaled(request.input_length, block)]


def _block(hash_id: int, block: int) -> list[int]:
    rng = random.Random(hash_id)
    rest = [rng.randrange(VOCABULARY) for _ in range(block - 2)]
    return [hash_id % VOCABULARY, hash_id // VOCABULARY % VOCABULARY, *rest]


def ideal_reuse(requests: Sequence[Request], block: int) -> int:
    """Tokens of prompts that one cache of any size would have served.

    Those of each prompt's first ids that came before, but for its last token, which is computed
    in any case.
    """
    seen: set[int] = set()
    reused = 0
    for request in requests:
        known = 0
        while known < len(request.hash_ids) and request.hash_ids[known] in seen:
            known += 1
        reused += min(known * block, scaled(request.input_length, block) - 1)
        seen.update(request.hash_ids)
    return reused
