"""A real store replays a trace: scheduler, look-ups, keeper, budget and evictor, files on disk.

What is not real is the engine: its blocks are tables of numbers, and a rank writes rows of zeros.
The store's two threads are stepped by hand, so that a replay does not depend on the machine's pace.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdconn.planning.plan import window_start
from pdconn.protocol.ticket import BlockList
from pdconn.store.engine import build, keeper_thread
from pdconn.store.engine.lookups import LookupQuestion
from pdconn.store.format.footer import encode_note, row_sizes
from pdconn.store.format.row import store_layout
from pdconn.store.rank_commands import Fetch, FetchResult, LoadRows, OpenStore, SaveResult, SaveRows
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.open import open_shelf
from pdconn.threads import Worker
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.store.curve import TracedRequest
from registration.references import AttentionKind
from tests.tools.plan.curve.drawn import PASS_TOKENS


class SteppedWorker(Worker[Any]):
    """A worker whose thread is not started."""

    def start_thread(self) -> None: ...


class ReplayedStore:
    """A store on ``settings.root``, and an engine of one rank that uses it."""

    def __init__(
        self, settings: StoreSettings, engine: EngineShape, patch: pytest.MonkeyPatch
    ) -> None:
        workers: list[SteppedWorker] = []

        def worker(*args: Any) -> SteppedWorker:
            workers.append(SteppedWorker(*args))
            return workers[-1]

        patch.setattr(build, "Worker", worker)
        patch.setattr(keeper_thread, "_BUSY_S", 0.0)
        patch.setattr(keeper_thread, "_IDLE_S", 0.0)
        self.now = 0.0
        ranks = engine.references(1)
        self.layout = store_layout(ranks, settings.block_tokens)
        self.store = build.build_scheduler(
            settings, self.layout, ranks, namespace="ns", writer="w", clock=lambda: self.now
        )
        keeper, lookups = workers
        self._keeper, self._lookups = keeper._work.__self__, lookups._work.__self__  # type: ignore[attr-defined]
        self._groups = build.groups_of(ranks)
        self._saves_answers = settings.save == "all"
        self._sizes = row_sizes(self.layout)
        self._shelf, self._keepers = open_shelf(settings), self._keeper._begin()
        self._results: list[Any] = []
        self._number = 0
        self.most_nbytes = 0
        self.root = Path(settings.root)
        self._turn()

    def close(self) -> None:
        """Close what is open."""
        self._keeper._budget.close()
        self._shelf.close()
        self._keepers.close()

    def serve(self, request: TracedRequest) -> int:
        """Serve a request; returns the tokens that the store has loaded."""
        self._number += 1
        self.now = request.at_s
        name, tokens = f"r{self._number}", tokens_of(request, self._number)
        num_prompt, store = request.num_tokens, self.store
        prompt = tokens[:num_prompt]
        store.on_new_request(name, prompt, num_prompt, lambda: (), may_load=True, reads_files=False)
        while (found := store.get_num_new_matched_tokens(name, num_prompt, 0)) is None:
            self._turn()
        held = tuple(BlockList(0, (1,)) for _ in self._groups)
        store.update_state_after_alloc(name, held, found)
        self._turn()
        if found:
            store.loads.end_load(name)
        self._compute(name, prompt, tokens, found)
        store.request_finished(name)
        self._turn()
        return found

    def _compute(self, name: str, prompt: list[int], tokens: Sequence[int], start: int) -> None:
        """Passes over the prompt, then one for each token of the answer but the last."""
        before, num_prompt, junction = start, len(prompt), self.store.junction_of(name)
        while before < num_prompt:
            after = self._end_of_pass(before, num_prompt, junction)
            self._pass(name, before, after)
            before = after
        if self._saves_answers:
            for after in range(num_prompt + 1, len(tokens)):
                prompt.append(tokens[after - 1])
                self._pass(name, after - 1, after)

    def _end_of_pass(self, before: int, num_prompt: int, junction: int) -> int:
        after = min(before + PASS_TOKENS, num_prompt)
        if not any(group.kind is AttentionKind.STATE for group in self._groups):
            return after
        # As vLLM's scheduler: a pass ends at the end of a block, at the prompt's last such end, and
        # where prompts part.
        size = self.layout.block_tokens
        last = num_prompt // size * size
        for end in (junction, last):
            if before < end < after:
                return end
        return after if before >= last else max(before + size, after // size * size)

    def _pass(self, name: str, before: int, after: int) -> None:
        self.store.save_pass(name, before, after, lambda: self._tables(before, after))
        self._turn()

    def _tables(self, before: int, after: int) -> tuple[list[int], ...]:
        """The request's blocks by group: 1 where the engine holds one, 0 for a hole."""
        tables = []
        for group in self._groups:
            count = -(-after // group.block_tokens)
            if group.kind is AttentionKind.STATE:
                ends = (before, after)
                tables.append([int((at + 1) * group.block_tokens in ends) for at in range(count)])
            else:
                first = window_start(group, before) // group.block_tokens
                tables.append([int(at >= first) for at in range(count)])
        return tuple(tables)

    def _turn(self) -> None:
        """Everything that threads and the rank would do until they are idle."""
        for _ in range(2):
            self._rank(self.store.take_commands())
            for item in self._lookups._inbox.take_all():
                if isinstance(item, LookupQuestion):
                    self._lookups._outbox.put(self._lookups._answer(item))
                else:
                    self._lookups._finder.catalogue.learn_rows(item, self.now)
            self.store.note_results(self._results)
            self._results.clear()
            self._keeper._take_commands(self._keepers)
            self._keeper._step(self._keepers)
            self.store._keeper.take_reports()
        self.most_nbytes = max(
            self.most_nbytes, self.store.budget_gauges()["store_committed_bytes"]
        )

    def _rank(self, commands: Sequence[Any]) -> None:
        for command in commands:
            match command:
                case OpenStore():
                    self._opening = command
                case SaveRows(number, _, rows):
                    for row in rows:
                        kind = row.name.kind
                        slabs = range(len(self.layout.for_kind(kind).slabs))
                        self._shelf.begin("w", row.part, self._sizes[kind])
                        self._shelf.put_note("w", row.part, 0, encode_note(dict.fromkeys(slabs, 0)))
                    self._results.append(SaveResult(number))
                case Fetch(number, _, rows):
                    gone = [name for name in rows if not self._shelf.has("ns", name)]
                    self._results.append(FetchResult(number, tuple(gone)))
                case LoadRows():
                    pass


def tokens_of(request: TracedRequest, number: int) -> list[int]:
    """Tokens of a prompt and its answer: those of a block follow from its id."""
    tokens: list[int] = []
    until = request.num_tokens + request.answer_tokens
    for one in request.ids:
        tokens += [(one * 1009 + at) % 4_000_000_007 for at in range(request.block_tokens)]
    tokens += [number * 4099 + at for at in range(until - len(tokens))]
    return tokens[:until]


def replay(
    settings: StoreSettings, engine: EngineShape, requests: Sequence[TracedRequest]
) -> tuple[float, int]:
    """The share of prompt tokens that a real store loads, and the most bytes of its rows."""
    with pytest.MonkeyPatch.context() as patch:
        store = ReplayedStore(settings, engine, patch)
        try:
            loaded = sum(store.serve(request) for request in requests)
        finally:
            store.close()
    return loaded / sum(request.num_tokens for request in requests), store.most_nbytes
