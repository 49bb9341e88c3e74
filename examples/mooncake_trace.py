"""Writes a trace of conversations in Mooncake's format, to try ``pdconn plan --store --trace``.

::

    python examples/mooncake_trace.py 2000 > trace.jsonl
    pdconn plan --model gpt-oss-120b --store --trace trace.jsonl --prefill-rate 12000

Requests belong to conversations over a few system prompts.  A conversation goes on after a pause,
from where it was: its prompt, the answer, and a turn more.  A line is a request::

    {"timestamp": 1200, "input_length": 1900, "output_length": 180, "hash_ids": [0, 1, 17, 18]}

``hash_ids`` has one for every 512 tokens of the prompt, and one for the rest.  Equal ids mean equal
tokens up to there, so a real trace is made of digests of the prompt's blocks, each of which depends
on the one before it.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
from collections.abc import Iterator
from itertools import count

BLOCK = 512
SYSTEM_PROMPTS = 8


def requests(number: int, seed: int = 1) -> Iterator[dict[str, object]]:
    """So many requests, the same for the same seed."""
    rng = random.Random(seed)
    fresh = count(SYSTEM_PROMPTS * 4)
    # (time in ms, number, tokens, ids of whole blocks, turns that are left)
    due: list[tuple[int, int, int, list[int], int]] = []
    conversations = count()
    now = 0
    for _ in range(number):
        now += int(rng.expovariate(1 / 500))
        if due and due[0][0] <= now:
            _, conversation, tokens, ids, turns = heapq.heappop(due)
        else:
            conversation, turns = next(conversations), int(rng.expovariate(1 / 4))
            system = rng.randrange(SYSTEM_PROMPTS)
            ids, tokens = [4 * system + block for block in range(4)], 4 * BLOCK
        tokens += 1 + int(rng.expovariate(1 / 1200))
        ids = ids + [next(fresh) for _ in range(tokens // BLOCK - len(ids))]
        answer = 1 + int(rng.expovariate(1 / 250))
        yield {
            "timestamp": now,
            "input_length": tokens,
            "output_length": answer,
            "hash_ids": ids + [next(fresh)] * (tokens % BLOCK > 0),
        }
        if turns:
            pause = int(rng.expovariate(1 / 60_000))
            ids = ids + [next(fresh) for _ in range((tokens + answer) // BLOCK - len(ids))]
            heapq.heappush(due, (now + pause, conversation, tokens + answer, ids, turns - 1))


if __name__ == "__main__":
    for request in requests(int(sys.argv[1])):
        print(json.dumps(request))
