"""Our index with both groups and with full attention alone, compiled and not; and a dictionary."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import xxhash

from pdconn.router.events.tracker import Apply, Numbered, Tracker
from pdconn.router.prefix.block_index import Index
from pdconn.router.prefix.compiled import extension
from pdconn.router.prefix.kv_events import decode_batch
from pdconn.router.prefix.score import Prompt, Scorer
from tests.throughput.index.recording import BLOCK_TOKENS
from tests.throughput.index.replay import Contestant, Row


class Ours:
    """From the bytes of a batch on, as the subscriber does: mark, decode, order, apply."""

    def __init__(self, pods: int, *, windows: bool) -> None:
        self.windows = windows
        self._index = Index()
        self._scorer = Scorer(self._index)
        self._names = [str(pod) for pod in range(pods)]
        self._trackers = [Tracker() for _ in range(pods)]
        self._seqs = [0] * pods
        for name, tracker in zip(self._names, self._trackers, strict=True):
            self._index.add_pod(name)
            tracker.connected()
            tracker.replay_ended()

    def batches_of(self, row: Row) -> list[bytes]:
        both, alone = row[4] or ([], [])
        batches: list[bytes] = both if self.windows else alone
        return batches

    def prompt_of(self, row: Row) -> Prompt:
        # One token more, since an engine computes the last one in any case.
        return Prompt(row[2], len(row[2]) * BLOCK_TOKENS + 1, BLOCK_TOKENS)

    def apply_batch(self, pod: int, payload: bytes) -> None:
        seq = self._seqs[pod]
        self._seqs[pod] += 1
        mark = xxhash.xxh3_64_intdigest(payload)
        item = Numbered(seq, mark, decode_batch(payload), len(payload))
        for effect in self._trackers[pod].live(item):
            if not isinstance(effect, Apply):
                raise SystemExit(f"unexpected {effect}")
            for event in effect.batch.events:
                self._index.apply_event(self._names[pod], event)

    def matches(self, prompt: Prompt) -> dict[int, int]:
        hits = self._scorer.score(prompt)
        return {int(pod): hit.blocks for pod, hit in hits.items() if hit.blocks}


class PlainDict:
    """The pods that hold a block, by its hash; of Dynamo's events."""

    windows = False

    def __init__(self, pods: int) -> None:
        self._holders: dict[int, set[int]] = {}

    def batches_of(self, row: Row) -> list[bytes]:
        return row[5]

    def prompt_of(self, row: Row) -> list[int]:
        return row[2]

    def apply_batch(self, pod: int, payload: bytes) -> None:
        data = msgspec.json.decode(payload)["data"]
        for block in data.get("stored", {"blocks": ()})["blocks"]:
            self._holders.setdefault(block["block_hash"], set()).add(pod)
        for block in data.get("removed", {"block_hashes": ()})["block_hashes"]:
            holders = self._holders[block]
            holders.discard(pod)
            if not holders:
                del self._holders[block]

    def matches(self, prompt: list[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        left: set[int] | None = None
        for number, block in enumerate(prompt, 1):
            holders = self._holders.get(block, set())
            left = set(holders) if left is None else left & holders
            if not left:
                break
            found.update(dict.fromkeys(left, number))
        return found


def made(name: str, pods: int) -> Contestant:
    """The index of this name, empty.

    Raises:
        KeyError: there is none.
        RuntimeError: the compiled one was not built.
    """
    makers: dict[str, Callable[[], Contestant]] = {
        "windows": lambda: Ours(pods, windows=True),
        "full": lambda: Ours(pods, windows=False),
        "dict": lambda: PlainDict(pods),
    }
    if name.startswith("python-"):
        extension.module = None
    elif name != "dict" and extension.module is None:
        raise RuntimeError(f"the index is not compiled: {extension.why_not}")
    return makers[name.removeprefix("python-")]()
