"""The pulled KV: one decode rank's share of prompts that a prefill engine computed.

Two engine shapes describe fictional memory, whose size both sides compute from the same few
numbers.  Each side allocates its own, and the lender sends the location of its memory
(:func:`allocated`); :func:`placed` moves a description there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pdconn.planning.plan import Need, Pairing
from pdconn.tools.bench.bench_errors import BadOption, BenchError
from pdconn.tools.bench.transfer.arena import BenchMemory
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.tables import IDS, Ids, Tables, tables_of_requests
from registration.references import KVCacheReferences
from transport import Memory

LAYERED = "LBHNC"
MAX_REQUESTS = 1024
MAX_PROMPT_TOKENS = 1 << 20


@dataclass(frozen=True)
class Workload:
    """``requests`` prompts of ``prompt_tokens`` tokens, pulled by decode rank ``rank``.

    ``ids`` is the order of block ids in both caches; they are drawn with ``seed``.

    Raises:
        BadOption: an invalid value.
    """

    prefill: EngineShape
    decode: EngineShape
    prompt_tokens: int
    ids: Ids = "random"
    requests: int = 1
    rank: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for field, value, low, high in (
            ("prompt", self.prompt_tokens, 2, MAX_PROMPT_TOKENS),
            ("concurrency", self.requests, 1, MAX_REQUESTS),
            ("rank", self.rank, 0, self.decode.ranks - 1),
        ):
            if not low <= value <= high:
                raise BadOption(field, f"{low} to {high}", value)
        if self.ids not in IDS:
            raise BadOption("ids", ", ".join(IDS), self.ids)

    @property
    def until(self) -> int:
        """Number of pulled tokens: decode recomputes the last one."""
        return self.prompt_tokens - 1

    @cached_property
    def lent(self) -> list[Tables]:
        """The lender's blocks of each request."""
        return self._tables(self.prefill, self.seed)

    @cached_property
    def taken(self) -> list[Tables]:
        """The target blocks of each request."""
        return self._tables(self.decode, self.seed + 1)

    def needs(self) -> list[Need]:
        """What each request needs; nothing is cached."""
        return [Need.for_range(0, self.until, tables.lists) for tables in self.taken]

    def ours(self) -> KVCacheReferences:
        """Memory of the decode rank, at fictional addresses."""
        return self.decode.references(self.taken[0].num_blocks)[self.rank]

    def theirs(self) -> list[KVCacheReferences]:
        """Memory of every prefill rank, at fictional addresses."""
        return self.prefill.references(self.lent[0].num_blocks)

    def pairing(self, ours: KVCacheReferences, theirs: Sequence[KVCacheReferences]) -> Pairing:
        """The pairing from which every pull of this workload is planned."""
        return Pairing.between(ours, theirs, self.rank % self.decode.tp)

    def sources(self) -> tuple[int, ...]:
        """Prefill ranks that the decode rank reads from."""
        return self.pairing(self.ours(), self.theirs()).ranks

    def layered(self) -> Workload:
        """The workload with one tensor per layer, if all pages have one size; else unchanged."""
        try:
            return replace(
                self,
                prefill=replace(self.prefill, layout=LAYERED),
                decode=replace(self.decode, layout=LAYERED),
            )
        except ShapeError:
            return self

    def _tables(self, engine: EngineShape, seed: int) -> list[Tables]:
        return tables_of_requests(engine.groups, self.until, self.ids, seed, self.requests)


def extent(references: KVCacheReferences) -> int:
    """Bytes of the one allocation of an engine shape's rank."""
    [memory] = references.memories()
    return memory.nbytes


def allocated(
    engine: EngineShape, rank: int, num_blocks: int, arena: BenchMemory
) -> KVCacheReferences:
    """Allocate the memory of a rank in ``arena``, in its engine's layout; returns its location.

    Raises:
        BenchError: torch is not installed, or the arena is too small.
    """
    try:
        from pdconn.tools.bench.transfer.bench_pages import allocate_rank
    except ImportError as error:
        raise BenchError(f"torch, which allocates memory, cannot be imported: {error}") from error
    return allocate_rank(engine, rank, num_blocks, arena.take_tensor).references


def placed(references: KVCacheReferences, memory: Memory) -> KVCacheReferences:
    """The same description, moved to the allocation at ``memory``."""
    if extent(references) > memory.nbytes:
        raise BadOption("memory", f"{extent(references)} bytes", memory.nbytes)
    tensors = tuple(replace(t, base=memory.base) for t in references.tensors)
    return replace(references, tensors=tensors)
