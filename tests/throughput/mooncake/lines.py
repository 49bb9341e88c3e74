"""The prompts that lines of a trace of Mooncake's stand for, and what could be reused.

A line names a prompt by ids of its blocks of 512 tokens; the last may be of a part of one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pdconn.tools.plan.store.curve import TracedRequest
from pdconn.tools.plan.store.trace import MOONCAKE_BLOCK

VOCABULARY = 50_000


def scaled(tokens: int, block: int) -> int:
    """So many tokens of the trace, where an id stands for ``block`` tokens; 1 at least."""
    return max(1, math.ceil(tokens * block / MOONCAKE_BLOCK))


def prompt(request: TracedRequest, block: int) -> list[int]:
    """The prompt: equal ids give equal tokens, different ids different ones."""
    tokens = [token for one in request.ids for token in _block(one, block)]
    return tokens[: scaled(request.num_tokens, block)]


def _block(hash_id: int, block: int) -> list[int]:
    rng = random.Random(hash_id)
    rest = [rng.randrange(VOCABULARY) for _ in range(block - 2)]
    return [hash_id % VOCABULARY, hash_id // VOCABULARY % VOCABULARY, *rest]


def ideal_reuse(requests: Sequence[TracedRequest], block: int) -> int:
    """Tokens of prompts that one cache of any size would have served.

    Those of each prompt's first ids that came before, but for its last token, which is computed
    in any case.
    """
    seen: set[int] = set()
    reused = 0
    for request in requests:
        known = 0
        while known < len(request.ids) and request.ids[known] in seen:
            known += 1
        reused += min(known * block, scaled(request.num_tokens, block) - 1)
        seen.update(request.ids)
    return reused
