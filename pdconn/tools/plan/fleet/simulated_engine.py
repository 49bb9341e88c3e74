"""One engine of a simulated fleet: prompts one after the other, streams all at a time.

Every stream of an engine gets its next token in the same step, so all advance alike: ``tokens``
counts the steps since the engine's start, and a stream that joined at 100 and wants 50 tokens
ends when the count is 150.  That makes an event of a stream's end, whatever the others do.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from pdconn.tools.plan.fleet.fleet_load import Arrival, EngineRates


@dataclass(slots=True)
class SimulatedRequest:
    """A request on its way through the fleet."""

    arrival: Arrival
    ticket_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float | None = None
    tries: int = 0

    def is_good(self, ttft_s: float, itl_s: float) -> bool:
        """Whether it has ended within both targets."""
        if self.ended_s is None:
            return False
        between_s = (self.ended_s - self.first_token_s) / max(1, self.arrival.answer_tokens - 1)
        return self.first_token_s - self.arrival.at_s <= ttft_s and between_s <= itl_s


class SimulatedEngine:
    """One engine.

    Attributes:
        name: of the engine.
        boot: number of its starts: what a former one was doing is void.
        inflight: requests that were sent to it and have not left it.
        backlog: tokens of prompts that it has to compute.
        steps_version: number of changes of its streams: an end that was predicted before is void.
    """

    def __init__(self, name: str, rates: EngineRates) -> None:
        self.name, self._rates = name, rates
        self.up, self.boot = True, 0
        self.inflight: dict[int, SimulatedRequest] = {}
        self.backlog = 0
        self.steps_version = 0
        self._free_s = 0.0
        self._streams: list[tuple[float, int]] = []
        self._waiting: deque[int] = deque()
        self._tokens = self._tokens_s = 0.0
        self._seen = (0.0, 0.0)

    @property
    def num_streams(self) -> int:
        """Streams that get tokens."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room in the KV cache."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use."""
        return len(self._streams) / self._rates.most_streams

    def prefill_end_s(self, number: int, request: SimulatedRequest, now: float) -> float:
        """Queue a prompt; returns when it will be computed."""
        self.inflight[number] = request
        tokens = request.arrival.prompt_tokens
        self.backlog += tokens
        self._free_s = max(now, self._free_s) + self._rates.prefill_s(tokens)
        return self._free_s

    def end_prefill(self, number: int) -> None:
        """A prompt is computed."""
        self.backlog -= self.inflight.pop(number).arrival.prompt_tokens

    def expect_stream(self, number: int, request: SimulatedRequest) -> None:
        """A request was sent here to be decoded, and pulls its KV."""
        self.inflight[number] = request

    def start_stream(self, number: int, now: float) -> None:
        """Its KV is here: it decodes, or waits for room."""
        self._advance(now)
        if len(self._streams) >= self._rates.most_streams:
            self._waiting.append(number)
            return
        request = self.inflight[number]
        heapq.heappush(self._streams, (self._tokens + request.arrival.answer_tokens - 1, number))
        request.first_token_s = now + self._rates.itl_s(len(self._streams))
        self.steps_version += 1

    def next_end_s(self) -> float | None:
        """When its next stream ends; None without streams."""
        if not self._streams:
            return None
        left = self._streams[0][0] - self._tokens
        return self._tokens_s + max(0.0, left) * self._rates.itl_s(len(self._streams))

    def end_stream(self, now: float) -> SimulatedRequest:
        """The next stream has ended; one that waits takes its place."""
        self._advance(now)
        _, number = heapq.heappop(self._streams)
        request = self.inflight.pop(number)
        request.ended_s = max(now, request.first_token_s)
        self.steps_version += 1
        if self._waiting:
            self.start_stream(self._waiting.popleft(), now)
        return request

    def mean_itl_s(self, now: float) -> float | None:
        """Seconds of a token since the call before; None without tokens."""
        self._advance(now)
        (tokens, at_s), self._seen = self._seen, (self._tokens, now)
        grown = self._tokens - tokens
        return (now - at_s) / grown if grown > 0 and self._streams else None

    def die(self, now: float) -> list[tuple[int, SimulatedRequest]]:
        """It loses all it holds; returns the requests."""
        lost, self.inflight = list(self.inflight.items()), {}
        self.up, self.backlog, self._free_s = False, 0, now
        self._streams, self._waiting = [], deque()
        self.boot += 1
        self.steps_version += 1
        return lost

    def _advance(self, now: float) -> None:
        if self._streams:
            self._tokens += (now - self._tokens_s) / self._rates.itl_s(len(self._streams))
        self._tokens_s = now
