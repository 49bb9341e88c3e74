"""What the blocks of an engine without a model hold, token by token.

A step that runs writes what it computes, and attends to the tokens before, which must be there.
Prompts are consecutive numbers, so a token is known by its prompt's first one and its place; the
answer to a prompt is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.vllm.patches.vllm_scheduler import BLOCK_TOKENS

Token = tuple[object, int]


@dataclass(frozen=True, slots=True)
class Pass:
    """What a step in flight computes of a request, into which of its blocks."""

    name: str
    request: Any
    blocks: tuple[int, ...]
    tokens: range


class KnownTokens:
    """Memory of so many ranks.

    Attributes:
        passes: of each step in flight.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._held: list[dict[tuple[int, int], Token]] = [{} for _ in range(ranks)]
        self.passes: list[list[Pass]] = []

    def begin_step(self, scheduler: Any, step: Any) -> None:
        """A step is in flight."""
        begins = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.passes.append(
            [
                Pass(
                    name,
                    scheduler.requests[name],
                    blocks_of(scheduler, name),
                    range(begins[name], begins[name] + num_tokens),
                )
                for name, num_tokens in step.num_scheduled_tokens.items()
            ]
        )

    def end_step(self) -> None:
        """The oldest step in flight has run."""
        for one in self.passes.pop(0):
            for held in self._held:
                for at in range(one.tokens.start):
                    seen, expected = held.get(place(one.blocks, at)), token(one.request, at)
                    assert seen == expected, f"{one.name} attends to {seen}, expected {expected}"
                for at in one.tokens:
                    held[place(one.blocks, at)] = token(one.request, at)

    def write(self, rank: int, at: tuple[int, int], written: Token) -> None:
        """Something else than a step has written."""
        self._held[rank][at] = written

    def read(self, at: tuple[int, int], rank: int = 0) -> Token | None:
        """What is there."""
        return self._held[rank].get(at)


def blocks_of(scheduler: Any, name: str) -> tuple[int, ...]:
    """Blocks that a request has now, by their place."""
    (ids,) = scheduler.kv_cache_manager.get_block_ids(name)
    return tuple(ids)


def token(request: Any, at: int) -> Token:
    """What a request has at a place."""
    first, length = request.prompt_token_ids[0], request.num_prompt_tokens
    return (first if at < length else (first, length), at)


def place(blocks: tuple[int, ...], at: int) -> tuple[int, int]:
    """Block and slot of a token."""
    return blocks[at // BLOCK_TOKENS], at % BLOCK_TOKENS
