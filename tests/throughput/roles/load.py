"""An open load of one kind of request after another, and which requests kept both targets."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from pdconn.tools.lab.compare_answers import Answer, compare
from pdconn.tools.lab.lab_client import Client

_AT_ONCE = 1000
SERVED = 0.98
"""Goodput of the best fixed ratio at the rate of which ``SLOWER`` is taken."""
SLOWER = 0.85
LEAST_RATE = 0.35


@dataclass(frozen=True)
class Targets:
    """Seconds to the first token, and from one token of an answer to the next."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True)
class Kind:
    """Requests of one phase.

    Attributes:
        prompts: sent one after the other, again and again.
        right: the answer of one engine alone to each prompt.
        per_s: requests a second, at random times.
    """

    name: str
    prompts: Sequence[tuple[int, ...]]
    right: Sequence[Answer]
    num_tokens: int
    per_s: float


@dataclass(frozen=True)
class Outcome:
    """What became of one request: times in seconds, or an error; ``differs`` from the right one."""

    first_s: float = 0.0
    token_s: float = 0.0
    error: str | None = None
    differs: str | None = None

    def keeps(self, targets: Targets) -> bool:
        """Whether it is right, and within both targets."""
        is_right = self.error is None and self.differs is None
        return is_right and self.first_s <= targets.ttft_s and self.token_s <= targets.itl_s


@dataclass(frozen=True)
class Phase:
    """All requests that arrived in a phase."""

    name: str
    outcomes: Sequence[Outcome]

    def goodput(self, targets: Targets) -> float:
        """The share of its requests that keep both targets."""
        return sum(one.keeps(targets) for one in self.outcomes) / len(self.outcomes)

    @property
    def num_lost(self) -> int:
        """Requests that were not answered."""
        return sum(one.error is not None for one in self.outcomes)

    @property
    def num_wrong(self) -> int:
        """Answers that are not the one of an engine alone."""
        return sum(one.differs is not None for one in self.outcomes)

    @property
    def first_error(self) -> str | None:
        """Of the requests that were lost or wrong."""
        return next((one.error or one.differs for one in self.outcomes if not _is_right(one)), None)


def _is_right(one: Outcome) -> bool:
    return one.error is None and one.differs is None


class NoRate(Exception):
    """No load was found that the best fixed ratio serves."""


def served_rate(per_s: float, goodput_at: Callable[[float], float]) -> float:
    """``SLOWER`` of the first rate, from ``per_s`` down, of which ``SERVED`` keep both targets.

    What one engine takes is measured in a moment, beside an idle router: at the rate that follows
    from it the best ratio may keep no target, and then no ratio could show anything.  One that it
    serves for a moment it may not serve for minutes: the machine had become slower by a quarter
    in one run, and kept half of the targets with every ratio.

    Raises:
        NoRate: not even ``LEAST_RATE`` of it is served.
    """
    goodputs, rate = [], per_s
    while rate >= LEAST_RATE * per_s:
        goodputs.append(goodput_at(rate))
        if goodputs[-1] >= SERVED:
            return rate * SLOWER
        rate *= SLOWER
    raise NoRate(f"at {per_s:.1f} requests/s and less the goodput is {goodputs}")


class Sender:
    """Sends requests at their times, however many are under way."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._sent: list[tuple[str, Outcome]] = []
        self._lock = threading.Lock()

    def send(self, name: str, kind: Kind, seconds: float, seed: int) -> None:
        """Requests of a kind for so long; returns when the last has been sent."""
        dice = random.Random(seed)
        began = due = time.monotonic()
        for number in itertools.count():
            due += dice.expovariate(kind.per_s)
            if due > began + seconds:
                break
            time.sleep(max(0.0, due - time.monotonic()))
            self._pool.submit(self._one, name, kind, number % len(kind.prompts))
        time.sleep(max(0.0, began + seconds - time.monotonic()))

    def _one(self, name: str, kind: Kind, number: int) -> None:
        outcome = outcome_of(self._client, kind, number)
        with self._lock:
            self._sent.append((name, outcome))

    def ended(self) -> list[Phase]:
        """Wait for the last answer; what was sent, by phase, in order of names."""
        self._pool.shutdown(wait=True)
        names = sorted({name for name, _ in self._sent})
        return [Phase(each, [one for name, one in self._sent if name == each]) for each in names]


def outcome_of(client: Client, kind: Kind, number: int) -> Outcome:
    """Send one request and compare its answer."""
    try:
        timed = client.stream(kind.prompts[number], kind.num_tokens)
    except Exception as error:  # noqa: BLE001 - each kind is a lost request
        return Outcome(error=repr(error)[:300])
    tokens = max(1, kind.num_tokens - 1)
    differs = compare(kind.right[number], timed.answer)
    return Outcome(
        timed.first_token_s,
        (timed.last_token_s - timed.first_token_s) / tokens,
        differs=str(differs)[:300] if differs else None,
    )


@contextmanager
def streams(client: Client, prompts: Sequence[Sequence[int]], num_tokens: int) -> Iterator[None]:
    """Keep an engine busy with so many answers, one after the other for each prompt."""
    ends = threading.Event()

    def ask(prompt: Sequence[int]) -> None:
        while not ends.is_set():
            client.stream(prompt, num_tokens)

    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(ask, prompt) for prompt in prompts]
        try:
            yield
        finally:
            ends.set()
        for one in asked:
            one.result()  # a stream that failed has left the engine less busy than was meant
