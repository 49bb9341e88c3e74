"""An engine without a model: real scheduler and rank parts of a store over real memory.

KV of a token is made of the whole prefix before it, its layer and its head, so that bytes of
another prompt, head, layer or position are noticed.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pdconn.planning.plan import Need, window_start
from pdconn.protocol.ticket import BlockList
from pdconn.store.budget.locks import HeldWriter
from pdconn.store.engine.beside import BesideOffer, PullOutlook
from pdconn.store.engine.build import build_scheduler, groups_of
from pdconn.store.engine.keeper_thread import Budget
from pdconn.store.format.row import StoreLayout, store_layout
from pdconn.store.rank.store import RankStore
from pdconn.store.rank_commands import StoreCommand
from pdconn.store.settings import StoreSettings
from pdconn.store.shelf.interface import Shelf
from pdconn.store.shelf.open import open_shelf
from registration.references import (
    AttentionKind,
    GroupMemory,
    KVCacheGroupReference,
    KVCacheReferences,
    build_kv_cache_references,
)
from tests.fakes.layouts import layout_memory, layout_nbytes
from tests.store.joined.budgets import EndlessBudget

PATIENCE_S = 60.0


@dataclass(frozen=True)
class Model:
    """Full layers, and layers of one window (or chunk); all with ``heads`` KV heads.

    ``like_bfloat16`` says of which heads the KV looks like a model's, whose exponents are few.
    """

    full: tuple[str, ...] = ("layers.0.attn", "layers.2.attn")
    windowed: tuple[str, ...] = ("layers.1.attn", "layers.3.attn")
    window: int = 40
    kind: AttentionKind = AttentionKind.SLIDING_WINDOW
    heads: int = 4
    token_nbytes: int = 64
    compress_ratio: int = 1
    like_bfloat16: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shape:
    """How one engine keeps the model's KV."""

    tp: int = 1
    layout: str = "LBHNC"
    block_tokens: int = 16
    opaque: bool = False
    num_blocks: int = 160


@dataclass
class Outcome:
    """The result of one request."""

    loaded: int
    computed: int
    wrong: int
    saves: int = 0


@dataclass
class Pulled:
    """What came of a request that pulls: tokens loaded beside it by rank, and wrong bytes."""

    offered: int
    loaded: tuple[int, ...]
    wrong: int


@dataclass
class FakeEngine:
    """Runs prompts one after another, with a store over ``settings.root``."""

    settings: StoreSettings
    model: Model = field(default_factory=Model)
    shape: Shape = field(default_factory=Shape)
    namespace: str = "ns"
    writer: str = "writer"
    shelf: Callable[[], Shelf] | None = None
    pass_tokens: int = 96
    budget: Budget | None = field(default_factory=EndlessBudget)
    clock: Callable[[], float] = time.monotonic
    drops_results: bool = False

    def __post_init__(self) -> None:
        self.memory: list[list[np.ndarray]] = []
        self.ranks = [self._references(rank) for rank in range(self.shape.tp)]
        self.groups = groups_of(self.ranks)
        self.layout: StoreLayout = store_layout(self.ranks, self.settings.block_tokens)
        if self.settings.compression == "exponents":
            self.layout = self.layout.packed()
        opened = self.shelf or (lambda: open_shelf(self.settings))
        self.store = build_scheduler(
            self.settings, self.layout, self.ranks, namespace=self.namespace,
            writer=self.writer, clock=self.clock, shelf=opened, budget=self.budget,
        )  # fmt: skip
        hold = partial(HeldWriter, self.settings.root) if self.budget is None else None
        self.rank_stores = [
            RankStore(self.settings, references, rank, opened, hold=hold)
            for rank, references in enumerate(self.ranks)
        ]
        self.pinned: dict[int, tuple[BlockList, ...]] = {}
        self.refs = np.zeros((len(self.groups), self.shape.num_blocks), dtype=int)
        self.refs[:, 0] = 1
        self._reported: dict[str, int] = {}
        self._number = 0

    def _references(self, rank: int) -> KVCacheReferences:
        shape, model = self.shape, self.model
        heads = max(1, model.heads // shape.tp)
        first = rank * model.heads // shape.tp
        groups, arrays = [], []
        for layers, kind, window in (
            (model.full, AttentionKind.FULL, None),
            (model.windowed, model.kind, model.window),
        ):
            if not layers:
                continue
            sizes = {
                "num_blocks": shape.num_blocks, "num_heads": heads,
                "block_tokens": shape.block_tokens, "token_nbytes": model.token_nbytes,
            }  # fmt: skip
            array = np.zeros(layout_nbytes(row_layers=len(layers), **sizes), dtype=np.uint8)
            arrays.append(array)
            memory = layout_memory(
                shape.layout, base=array.ctypes.data, layers=layers,
                first_head=first, opaque=shape.opaque, **sizes,
            )  # fmt: skip
            ratio = 1 if window is None else model.compress_ratio
            groups.append(GroupMemory(kind, window, shape.block_tokens, memory, ratio))
        self.memory.append(arrays)
        return build_kv_cache_references(groups)

    def kv(self, group: int, rank: int) -> list[np.ndarray]:
        """A view of each layer, of shape (blocks, heads, tokens, bytes), in any layout."""
        references = self.ranks[rank]
        data = references.groups[group].data
        array, tokens = self.memory[rank][group], self.shape.block_tokens
        views = []
        for ref in data:
            tensor = references.tensors[ref.tensor]
            views.append(
                np.lib.stride_tricks.as_strided(
                    array[ref.offset :],
                    (tensor.num_blocks, ref.num_heads, tokens, self.model.token_nbytes),
                    (
                        tensor.block_stride, ref.head_stride,
                        ref.token_stride or self.model.token_nbytes, 1,
                    ),
                )
            )  # fmt: skip
        return views

    # A request

    def run(
        self,
        tokens: Sequence[int],
        *,
        name: str | None = None,
        num_local: int = 0,
        on_step: Callable[[], None] = lambda: None,
        salt: str | None = None,
    ) -> Outcome:
        """Load what can be loaded, check it, compute the rest, save; ``salt`` as vLLM's field."""
        self._number += 1
        name = name or f"request-{self._number}"
        self.store.on_new_request(
            name, list(tokens), len(tokens), lambda: [salt.encode()] if salt else (),
            cache_salt=salt, may_load=True, reads_files=False,
        )  # fmt: skip
        found = self._ask(name, len(tokens), num_local, on_step)
        ids = self._allocate(len(tokens))
        blocks = tuple(BlockList(0, tuple(group)) for group in ids)
        self._write(tokens, range(num_local), ids)
        wrong = 0
        took = self.store.update_state_after_alloc(name, blocks, found)
        assert took == bool(found)
        if found:
            self._until(lambda: self._reported.get(name, 0) == self.shape.tp, on_step)
            self.store.loads.end_load(name)
            wrong = self._wrong(tokens, num_local + found, ids)
        outcome = Outcome(found, len(tokens) - found - num_local, wrong)
        self._compute(name, tokens, num_local + found, ids, outcome)
        self.store.request_finished(name)
        for group, held in enumerate(ids):
            for block in held:
                self.refs[group, block] -= bool(block)
        return outcome

    def pull(
        self,
        tokens: Sequence[int],
        *,
        num_local: int = 0,
        bytes_per_s: float | None = None,
        on_step: Callable[[], None] = lambda: None,
        before_join: Callable[[], None] = lambda: None,
        is_aborted: bool = False,
    ) -> Pulled:
        """Pull a prompt but for its last token, of a lender that has all of it.

        The lender writes what the store does not, as each rank's pull does: it is told by then.
        """
        self._number += 1
        name, until = f"request-{self._number}", len(tokens) - 1
        self.store.on_new_request(
            name, list(tokens), len(tokens), lambda: (), may_load=True, reads_files=False
        )
        pull = PullOutlook(range(num_local, until), bytes_per_s)
        offers: list[BesideOffer] = []

        def is_offered() -> bool:
            offer = self.store.offer_beside(name, pull)
            offers.extend([offer] if offer else [])
            return offer is not None

        self._until(is_offered, on_step)
        before_join()
        ids = self._allocate(len(tokens))
        self._write(tokens, range(num_local), ids)
        need = Need.for_range(num_local, until, tuple(BlockList(0, tuple(g)) for g in ids))
        part = self.store.join_pull(name, need, pull)
        assert not self.store.update_state_after_alloc(name, need.blocks, 0)
        loaded = [num_local] * self.shape.tp
        if part is not None:
            if is_aborted:
                self.store.request_finished(name)
            ended: dict[int, Need] = {}
            self._until(lambda: self._ended_beside(name, ended), on_step)
            for rank, filled in ended.items():
                loaded[rank] = max([num_local, *(t.stop for t in filled.tokens)])
        for rank in range(self.shape.tp):
            self._write(tokens, range(num_local, until), ids, [rank], full_from=loaded[rank])
        wrong = self._wrong(tokens, until, ids)
        self.store.request_finished(name)
        for group, held in enumerate(ids):
            for block in held:
                self.refs[group, block] -= bool(block)
        counts = tuple(end - num_local for end in loaded)
        return Pulled(offers[-1].split - num_local, counts, wrong)

    def _ended_beside(self, name: str, ended: dict[int, Need]) -> bool:
        """Take what ranks say; whether all have ended."""
        for rank, store in enumerate(self.rank_stores):
            for one in store.take_ended_beside():
                assert one.request == name
                assert rank not in ended, "a rank has ended twice"
                ended[rank] = one.loaded
        return len(ended) == self.shape.tp

    def settle(self) -> None:
        """Wait until every row is committed or given up."""
        self._until(lambda: not self.pinned and self.store.is_settled(), lambda: None)

    def close(self) -> None:
        """Stop all threads."""
        self.store.close()
        for rank in self.rank_stores:
            rank.close()

    def step(self, *, passed: bool = False) -> None:
        """One step of the engine: commands to ranks, answers back."""
        commands: list[StoreCommand] = self.store.take_commands()
        for rank in self.rank_stores:
            for command in commands:
                rank.post_command(command)
            if passed:
                rank.after_pass()
        for rank in self.rank_stores:
            for request in rank.take_loaded():
                self._reported[request] = self._reported.get(request, 0) + 1
            assert not rank.take_load_failures()
            results = rank.take_results()
            for number in self.store.note_results(() if self.drops_results else results):
                self._unpin(self.pinned.pop(number))

    def _ask(self, name: str, num_tokens: int, num_local: int, on_step: Callable[[], None]) -> int:
        found = None

        def is_known() -> bool:
            nonlocal found
            found = self.store.get_num_new_matched_tokens(name, num_tokens, num_local)
            return found is not None

        self._until(is_known, on_step)
        assert found is not None
        return found

    def _until(self, is_so: Callable[[], bool], on_step: Callable[[], None]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < until, "nothing came"
            on_step()
            self.step()
            time.sleep(0.001)

    def _compute(
        self, name: str, tokens: Sequence[int], start: int, ids: list[list[int]], outcome: Outcome
    ) -> None:
        before = start
        while before < len(tokens):
            after = min(before + self.pass_tokens, len(tokens))
            self._free_windows(before, ids)
            saved = self.store.save_pass(name, before, after, lambda: tuple(map(list, ids)))
            if saved is not None:
                self.pinned[saved.number] = saved.blocks
                outcome.saves += 1
                for group, held in enumerate(saved.blocks):
                    for block in held.ids:
                        self.refs[group, block] += bool(block)
            self._write(tokens, range(before, after), ids)
            self.step(passed=True)
            before = after

    def _free_windows(self, computed: int, ids: list[list[int]]) -> None:
        """As vLLM does: blocks before the window of the next token are dropped."""
        for number, group in enumerate(self.groups):
            if group.window is None:
                continue
            for at in range(window_start(group, computed) // self.shape.block_tokens):
                if ids[number][at]:
                    self.refs[number, ids[number][at]] -= 1
                    ids[number][at] = 0

    def _allocate(self, num_tokens: int) -> list[list[int]]:
        count = -(-num_tokens // self.shape.block_tokens)
        found = []
        for group in range(len(self.groups)):
            free = np.flatnonzero(self.refs[group] == 0)[::-1][:count]
            assert len(free) == count, "no free blocks"
            self.refs[group, free] += 1
            found.append([int(block) for block in free])
        return found

    def _unpin(self, blocks: tuple[BlockList, ...]) -> None:
        for group, held in enumerate(blocks):
            for block in held.ids:
                self.refs[group, block] -= bool(block)

    def _write(
        self,
        tokens: Sequence[int],
        positions: range,
        ids: list[list[int]],
        ranks: Sequence[int] | None = None,
        *,
        full_from: int = 0,
    ) -> None:
        """Write the KV of tokens at ``positions``, on all ranks for None.

        ``full_from``: the first position of which full attention is written, too.
        """
        for group, reference in enumerate(self.groups):
            first = positions.start if reference.window else max(positions.start, full_from)
            held = range(first, positions.stop)
            written = [at for at in held if ids[group][at // self.shape.block_tokens]]
            if not written:
                continue
            blocks, within = self._places(group, written, ids)
            for rank in range(self.shape.tp) if ranks is None else ranks:
                for layer, view in enumerate(self.kv(group, rank)):
                    view[blocks, :, within] = self._labels(tokens, written, group, layer, rank)

    def _places(
        self, group: int, positions: Sequence[int], ids: list[list[int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The block of each token, and its place there."""
        index, within = np.divmod(np.asarray(positions), self.shape.block_tokens)
        return np.asarray(ids[group])[index], within

    def _labels(
        self, tokens: Sequence[int], positions: Sequence[int], group: int, layer: int, rank: int
    ) -> np.ndarray:
        """What stands for each token's KV, of shape (tokens, heads, bytes): of its whole prefix."""
        ref = self.ranks[rank].groups[group].data[layer]
        heads = np.arange(ref.first_head, ref.first_head + ref.num_heads)[:, None]
        content = np.arange(self.model.token_nbytes)[None, :]
        of_layer = 7919 * heads + 104729 * content + zlib.crc32(ref.layer.encode())
        prefixes = _prefixes(tuple(tokens))[list(positions), None, None]
        found = ((prefixes + of_layer) * 2654435761 >> 13).astype(np.uint8)
        for head in {*range(ref.first_head, ref.first_head + ref.num_heads)}.intersection(
            self.model.like_bfloat16
        ):
            numbers = found[:, head - ref.first_head].view(np.uint16)
            numbers &= 0x87FF
            numbers |= 0x3800
        return found

    def _wrong(self, tokens: Sequence[int], until: int, ids: list[list[int]]) -> int:
        """Bytes that a later token will read and that are not the prompt's."""
        wrong = 0
        for number, group in enumerate(self.groups):
            positions = range(_first_read(group, until), until)
            if not positions:
                continue
            blocks, within = self._places(number, positions, ids)
            for rank in range(self.shape.tp):
                for layer, view in enumerate(self.kv(number, rank)):
                    labels = self._labels(tokens, positions, number, layer, rank)
                    wrong += int((view[blocks, :, within] != labels).sum())
        return wrong


@functools.lru_cache(64)
def _prefixes(tokens: tuple[int, ...]) -> np.ndarray:
    """A checksum of all tokens up to each."""
    found, before = [], 0
    for token in np.asarray(tokens, dtype="<u4"):
        before = zlib.crc32(token.tobytes(), before)
        found.append(before)
    return np.array(found)


def _first_read(group: KVCacheGroupReference, until: int) -> int:
    """The first token before ``until`` that it or a later one reads.

    A compressor's next output ends at a token before a multiple of the ratio.
    """
    if group.compress_ratio == 1 or group.window is None:
        return window_start(group, until)
    end = next(
        t for t in range(until, until + group.compress_ratio) if not (t + 1) % group.compress_ratio
    )
    return max(0, min(until, end + 1 - group.window))


def until_ready(engine: FakeEngine) -> None:
    """Wait until the root's budget gives room; what is computed before is not saved."""
    room = engine.store._keeper._room
    until = time.monotonic() + PATIENCE_S
    while room is not None and not room.amount:
        assert time.monotonic() < until, "the budget gives no room"
        time.sleep(0.005)
