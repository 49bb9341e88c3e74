"""What prefill is sent and how long it takes, for the controller of roles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from pdconn.router.fleet.flights import InflightTracker
from pdconn.router.roles.role_reports import FirstTokenSample, PrefillSample
from pdconn.router.routing.request_events import Began, Event, FirstToken, Prefilled, StepKind
from pdconn.router.routing.routed_request import RoutedRequest

MOST_SAMPLES = 1024
"""Kept between two reports, and prompts under way that are timed."""


class PromptMeter:
    """Counts prompts and first tokens; ``take_counts`` returns them since the call before."""

    kinds: ClassVar[frozenset[type[Event]]] = frozenset((Began, Prefilled, FirstToken))

    def __init__(self, inflight: InflightTracker) -> None:
        self._inflight = inflight
        self._asked: dict[Began, tuple[int, int]] = {}
        self._sent_tokens = self._sent_prompts = 0
        self._prefilled: list[PrefillSample] = []
        self._first_tokens: list[FirstTokenSample] = []

    def saw(self, request: RoutedRequest, event: Event) -> None:
        """Note an event of a request."""
        match event:
            case Began(step=StepKind.PREFILL):
                self._prefill_asked(event)
            case Prefilled() if event.began in self._asked:
                tokens, ahead = self._asked.pop(event.began)
                if len(self._prefilled) < MOST_SAMPLES:
                    self._prefilled.append(PrefillSample(tokens, ahead, event.waited_s))
            case FirstToken() if len(self._first_tokens) < MOST_SAMPLES:
                prefilled, arrived_s = request.last(Prefilled), request.arrived_s
                prefill_s = 0.0 if prefilled is None else prefilled.at_s - arrived_s
                sample = FirstTokenSample(event.at_s - arrived_s, prefill_s)
                self._first_tokens.append(sample)

    def _prefill_asked(self, began: Began) -> None:
        tokens = began.facts.get("uncached")
        if began.engine is None or not isinstance(tokens, int):
            return  # a prefetch, which yields to requests
        _, in_flight = self._inflight.requests_at(began.engine)
        self._asked[began] = tokens, max(0, in_flight - tokens)
        if len(self._asked) > MOST_SAMPLES:  # of prompts whose engine failed
            del self._asked[next(iter(self._asked))]
        self._sent_tokens += tokens
        self._sent_prompts += 1

    def backlog_tokens(self, engines: Iterable[str]) -> int:
        """Tokens that engines have to compute now."""
        return sum(self._inflight.requests_at(name)[1] for name in engines)

    def take_counts(
        self,
    ) -> tuple[int, int, tuple[PrefillSample, ...], tuple[FirstTokenSample, ...]]:
        """Tokens and prompts that were sent, prompts that were computed, and first tokens."""
        taken = (
            self._sent_tokens,
            self._sent_prompts,
            tuple(self._prefilled),
            tuple(self._first_tokens),
        )
        self._sent_tokens = self._sent_prompts = 0
        self._prefilled, self._first_tokens = [], []
        return taken
