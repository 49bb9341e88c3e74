"""Clients of whole engines: each asks prefill, then decode, and asks again once it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.whole.engine import Engine, tokens_of
from tests.simulation.world import World

ANSWER = 4


@dataclass
class Clients:
    """What was asked, and how long each answer took.

    Attributes:
        wrong: answers that were not their prompt's.
    """

    world: World
    took_s: list[float] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    num_open: int = 0

    def hand_over(
        self,
        number: int,
        num_tokens: int,
        way: tuple[Engine, Engine],
        then: Callable[[], None],
        *,
        source: dict[str, Any] | None = None,
        num_answer: int = ANSWER,
    ) -> None:
        """Ask one engine for a ticket, then the other for the answer, then call ``then``."""
        prefill, decode = way
        began = self.world.now
        self.num_open += 1
        params: dict[str, Any] = {"do_remote_decode": True}
        if source is not None:
            params["pdconn"] = {"from": source}

        def answered(_: object, tokens: list[int]) -> None:
            self.num_open -= 1
            self.took_s.append(self.world.now - began)
            if tokens != tokens_of(number)[num_tokens : num_tokens + num_answer]:
                self.wrong.append(number)
            then()

        def prefilled(ticket: dict[str, Any] | None, _: object) -> None:
            self.world.at(
                self.world.lag(),
                lambda: decode.ask(number, num_tokens, num_answer, ticket, answered) and None,
            )

        prefill.ask(number, num_tokens, 1, params, prefilled)

    def borrow(
        self, number: int, num_tokens: int, holder: Engine, then: Callable[[Any], None]
    ) -> None:
        """Ask ``holder`` for the prefix of so many tokens; ``then`` gets the ticket or None."""
        params = {"do_remote_decode": True, "pdconn": {"lend": num_tokens}}

        def lent(ticket: dict[str, Any] | None, _: object) -> None:
            is_lent = ticket is not None and ticket.get("do_remote_prefill")
            then(ticket if is_lent else None)

        holder.ask(number, num_tokens + 1, 1, params, lent)
