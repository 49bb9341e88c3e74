"""The shape of an engine: a model, a layout and its parallelism.

It describes its memory as a real worker does, in ``KVCacheReferences``, one per rank, for the
planner of real pulls.  Addresses are fictional.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType

from pdconn.planning.layouts import LAYOUTS
from pdconn.tools.plan.grouping import LayerGroup, Paged, group_layers
from pdconn.tools.plan.layer_memory import OFFERED, RankPlace, chosen_layout, rank_memory
from pdconn.tools.plan.model_shape import LayerSort, ModelShape, StateSort
from pdconn.tools.plan.plan_errors import ShapeError
from registration.references import KVCacheReferences, build_kv_cache_references
from transport.errors import did_you_mean

MAX_RANKS = 4096
MAX_BLOCK_TOKENS = 1 << 16
_RANK_SPACING = 1 << 45
KERNEL_BLOCK_TOKENS = 16
"""Smallest block of most attention kernels."""
_MLA_STEP_TOKENS = 128
"""Divisor of the blocks of a latent in models with states."""
_BEST_FIRST = ("BHLNC", "BLHNC", "LBHNC", "BLNHC", "LBNHC", "LHBNC")


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine: ``tp`` times ``pp`` ranks that serve ``model``.

    ``layout`` is a memory order, by default vLLM's choice with pdconn; ``backend`` the attention
    backend, if its kernels support only some layouts; ``block_tokens`` the tokens per block of all
    sorts of layers without a fixed number, before vLLM enlarges it: with states, until a page of
    attention holds a state, and in layouts with layers outermost, until pages have one size.

    Raises:
        ShapeError: a value that the model or vLLM does not allow.
    """

    model: ModelShape
    layout: str = ""
    tp: int = 1
    pp: int = 1
    block_tokens: int = 16
    backend: str = ""

    def __post_init__(self) -> None:
        if self.layout not in ("", *LAYOUTS):
            raise ShapeError("layout", f"one of {', '.join(LAYOUTS)}", self.layout)
        if self.backend not in ("", *OFFERED):
            raise ShapeError("backend", f"one of {', '.join(OFFERED)}", self.backend)
        for field, most in (
            ("tp", MAX_RANKS),
            ("pp", min(MAX_RANKS, self.model.num_layers)),
            ("block", MAX_BLOCK_TOKENS),
        ):
            value = self.block_tokens if field == "block" else getattr(self, field)
            if not 1 <= value <= most:
                raise ShapeError(field, f"a whole number from 1 to {most}", value)
        self._check_sorts()
        self._check_layout()

    def _check_layout(self) -> None:
        possible = layouts_of(self._paged, self.tp)
        offered = OFFERED[self.backend] if self.backend else None
        if not self.layout:
            sorts = self.model.attention
            is_latent = bool(sorts) and all(sort.is_latent for sort in sorts)
            chosen = chosen_layout(possible, self.backend, is_latent=is_latent)
            if chosen is None:
                raise ShapeError("backend", f"one that reads {_or(possible)}", self.backend)
            object.__setattr__(self, "layout", chosen)
        elif self.layout not in possible:
            why = "for layers whose pages differ in their heads, rows or bytes"
            raise ShapeError("layout", f"{_or(possible)}, {why}", self.layout)
        elif offered is not None and self.layout not in offered:
            raise ShapeError("layout", f"{_or(offered)}, for {self.backend}", self.layout)

    def in_best_layout(self) -> EngineShape:
        """The same engine in the layout whose pulls have the fewest pieces."""
        offered = (OFFERED[self.backend] if self.backend else None) or LAYOUTS
        possible = [one for one in layouts_of(self._paged, self.tp) if one in offered]
        return replace(self, layout=min(possible, key=_BEST_FIRST.index))

    def _check_sorts(self) -> None:
        for state in self.model.states:
            for parts in state.state.parts:
                if not parts.divides_by(self.tp):
                    raise ShapeError("tp", f"a divisor of a state's {parts.count} parts", self.tp)
        if self.tp > 1 and not self.model.numbers_heads:
            counts = sorted({sort.heads for sort in self.model.attention})
            numbers = " and ".join(map(str, counts))
            expected = f"1: with {numbers} KV heads, vLLM does not say which a rank holds"
            raise ShapeError("tp", expected, self.tp)
        for sort in self.model.attention:
            if sort.heads % self.tp and self.tp % sort.heads:
                raise ShapeError("tp", f"a divisor or multiple of {sort.heads} KV heads", self.tp)
            if self._block_tokens(sort) % sort.row_tokens:
                raise ShapeError("block", f"a multiple of {sort.row_tokens}", self.block_tokens)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """KV cache groups of the whole model, the same on every rank."""
        paged = self._paged
        return group_layers(_unified(paged) if self.layout[0] == "L" else paged)

    @property
    def attention_block_tokens(self) -> int:
        """``block_tokens``, enlarged until a page of attention holds a state."""
        if not self.model.states or not self.model.attention:
            return self.block_tokens
        token_nbytes = max(
            max(1, sort.heads // self.tp) * sort.row_nbytes for sort in self.model.attention
        )
        is_mla = any(sort.is_latent for sort in self.model.attention)
        return raised_block_tokens(self.block_tokens, self.state_nbytes, token_nbytes, is_mla)

    @property
    def state_nbytes(self) -> int:
        """Bytes of a state of one layer on a rank; 0 without states."""
        return max((sort.state.state_nbytes(self.tp) for sort in self.model.states), default=0)

    @property
    def ranks(self) -> int:
        """Workers of the engine."""
        return self.tp * self.pp

    def references(self, num_blocks: int) -> list[KVCacheReferences]:
        """Memory of every rank, by stage; rank ``r`` is tensor-parallel rank ``r % tp``."""
        groups = self.groups
        return [
            build_kv_cache_references(rank_memory(groups, self.layout, num_blocks, place))
            for place in self.places()
        ]

    def places(self) -> list[RankPlace]:
        """Each rank's part of the model, in the order of :meth:`references`."""
        return [
            RankPlace(stage, rank, self.tp, (1 + number * self.tp + rank) * _RANK_SPACING)
            for number, stage in enumerate(pipeline_stages(self.model.num_layers, self.pp))
            for rank in range(self.tp)
        ]

    def __str__(self) -> str:
        backend = f",backend={self.backend}" if self.backend else ""
        return f"tp={self.tp},pp={self.pp},layout={self.layout},block={self.block_tokens}{backend}"

    @property
    def _paged(self) -> list[Paged]:
        """Every sort, with its block and page before pages are unified."""
        widest = max((self._page_nbytes(sort) for sort in self.model.attention), default=0)
        state_page = max(widest, self.state_nbytes)
        return [
            Paged(sort, self.attention_block_tokens, state_page)
            if isinstance(sort, StateSort)
            else Paged(sort, self._block_tokens(sort), self._page_nbytes(sort))
            for sort in self.model.sorts
        ]

    def _block_tokens(self, sort: LayerSort) -> int:
        return sort.block_tokens or self.attention_block_tokens

    def _page_nbytes(self, sort: LayerSort) -> int:
        rows = self._block_tokens(sort) // sort.row_tokens
        return max(1, sort.heads // self.tp) * rows * sort.row_nbytes


def raised_block_tokens(asked: int, state_nbytes: int, token_nbytes: int, is_mla: bool) -> int:
    """Tokens of a block whose page holds a state, as in vLLM's ``_align_hybrid_block_size``.

    >>> raised_block_tokens(16, 1_000_000, 2048, is_mla=False)
    496
    """
    step = max(asked, KERNEL_BLOCK_TOKENS, _MLA_STEP_TOKENS if is_mla else 0)
    tokens = step * -(-state_nbytes // (step * token_nbytes))
    return max(asked, -(-tokens // KERNEL_BLOCK_TOKENS) * KERNEL_BLOCK_TOKENS)


def layouts_of(paged: Sequence[Paged], tp: int) -> tuple[str, ...]:
    """The layouts in which vLLM can keep these pages.

    Pages of different block tables overlay each other.  If they differ in heads, rows or bytes,
    each has to be contiguous; if in bytes, with layers outermost, the smaller blocks are enlarged.
    """
    shapes = {(*_heads_and_rows(one, tp), one.page_nbytes) for one in paged}
    if len(shapes) == 1:
        return LAYOUTS
    keys = {one.key for one in paged}
    whole = [layout for layout in LAYOUTS if {*layout[:2]} == {"L", "B"}]
    if len(keys) > 1 and not _can_be_unified(paged):
        whole = [layout for layout in whole if layout[0] == "B"]
    return tuple(whole)


def _or(layouts: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(layouts[:-1]), layouts[-1])))


def _heads_and_rows(one: Paged, tp: int) -> tuple[int, int]:
    if isinstance(one.sort, StateSort):
        return 1, 1
    return max(1, one.sort.heads // tp), one.block_tokens // one.sort.row_tokens


def _can_be_unified(paged: Sequence[Paged]) -> bool:
    largest = max(one.page_nbytes for one in paged)
    return all(
        one.page_nbytes == largest
        or (isinstance(one.sort, LayerSort) and not one.sort.block_tokens
            and largest % one.page_nbytes == 0)
        for one in paged
    )  # fmt: skip


def _unified(paged: Sequence[Paged]) -> list[Paged]:
    """The groups with pages of one size: smaller ones get more tokens."""
    largest = max(one.page_nbytes for one in paged)
    if len({one.key for one in paged}) == 1 or not _can_be_unified(paged):
        return list(paged)
    return [
        replace(
            one,
            block_tokens=one.block_tokens * (largest // one.page_nbytes),
            page_nbytes=largest,
        )
        for one in paged
    ]


def pipeline_stages(layers: int, pp: int) -> list[range]:
    """Layers of each stage, as in vLLM's ``get_pp_indices``.

    Remaining layers go to the stages before the last one.

    >>> pipeline_stages(62, 4)
    [range(0, 15), range(15, 31), range(31, 47), range(47, 62)]
    """
    sizes = [layers // pp] * pp
    for stage in range(layers % pp):
        sizes[-2 - stage] += 1
    ends = [0, *accumulate(sizes)]
    return [range(ends[stage], ends[stage + 1]) for stage in range(pp)]


_KEYS: Mapping[str, str] = MappingProxyType(
    {"tp": "tp", "pp": "pp", "layout": "layout", "block": "block_tokens", "backend": "backend"}
)


def parse_engine(text: str, model: ModelShape) -> EngineShape:
    """Parse an engine from ``tp=4,pp=1,layout=LBHNC,block=16``; all keys have defaults.

    Raises:
        ShapeError: an unknown key (naming the nearest), a repeated one, or an invalid value.
    """
    given: dict[str, int | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS or not equals:
            raise ShapeError("key", "a known key with =VALUE", part, did_you_mean(key, _KEYS))
        if _KEYS[key] in given:
            raise ShapeError(key, "one value", part)
        if key == "block" and _whole(key, value) % KERNEL_BLOCK_TOKENS:
            step = f"a multiple of {KERNEL_BLOCK_TOKENS}, as attention kernels read"
            raise ShapeError(key, step, value)
        given[_KEYS[key]] = value.upper() if key in ("layout", "backend") else _whole(key, value)
    return EngineShape(model, **given)  # type: ignore[arg-type]


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ShapeError(key, "a whole number above 0", value or "nothing")
    return int(value)
