"""A lender and a puller that warms it, or other places, before any request."""

from __future__ import annotations

from functools import partial

from pdconn.puller.warmup import Pauses
from tests.fakes.pair import Pair
from tests.threads.inside import num_warm

SECONDS = 30.0

WarmPair = partial(Pair, pauses=Pauses(first_s=0.05, longest_s=0.2))
"""Pauses are counted, not waited for."""


def until_warm(pair: Pair, num: int = 1) -> None:
    pair.wait(lambda: num_warm(pair.puller) == num, SECONDS)
