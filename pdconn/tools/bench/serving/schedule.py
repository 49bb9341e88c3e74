"""The order of turns, and the send times of requests.  Pure and determined by the seed.

Machines drift, so contestants take turns: every round has one turn of each, and starts with another
contestant than the previous round::

    round 1   A B C
    round 2   C A B
    round 3   B C A

Within a round all contestants get the same prompts at the same times; no two rounds share a prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdconn.tools.lab.compare_answers import make_prompts

Prompt = tuple[int, ...]


def order(names: Sequence[str], round_number: int) -> tuple[str, ...]:
    """The turns of a round, counted from 1.

    >>> order("ABC", 2)
    ('C', 'A', 'B')
    """
    first = (1 - round_number) % len(names)
    return (*names[first:], *names[:first])


def prompts(count: int, num_tokens: int, seed: int, round_number: int) -> list[Prompt]:
    """The prompts of a round: random token ids below 2048.

    Negative rounds are warm-up rounds, which are not counted.
    """
    return make_prompts([num_tokens] * count, seed=_seed("prompts", seed, round_number))


def due_times(count: int, per_s: float, seed: int, round_number: int) -> tuple[float, ...]:
    """Send times in seconds after the first request: a Poisson process."""
    source = random.Random(_seed("times", seed, round_number))
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + source.expovariate(per_s))
    return tuple(times[:count])


def _seed(what: str, seed: int, round_number: int) -> int:
    return random.Random(f"{what} {seed} {round_number}").getrandbits(64)
