"""The shape of an engine: a model, a layout and its parallelism.

It describes its memory as a real worker does, in ``KVCacheReferences``, one per rank, for
the planner of real pulls.  Addresses are fictional.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from pdconn.forecast.errors import ShapeError
from pdconn.forecast.grouping import LayerGroup, Paged, group_layers
from pdconn.forecast.memory import LAYOUTS, RankPlace, rank_memory
from pdconn.forecast.model import LayerSort, ModelShape
from registration.references import KVCacheReferences, build_kv_cache_references
from transport.errors import did_you_mean

MAX_RANKS = 4096
MAX_BLOCK_TOKENS = 1 << 16
_RANK_SPACING = 1 << 45


@dataclass(frozen=True, slots=True)
class EngineShape:
    """One engine: ``tp`` times ``pp`` ranks that serve ``model``.

    ``layout`` is a memory order; ``block_tokens`` the tokens per block of all sorts
    of layers without a fixed number.

    Raises:
        ShapeError: a value that the model or vLLM does not allow.
    """

    model: ModelShape
    layout: str = "BHLNC"
    tp: int = 1
    pp: int = 1
    block_tokens: int = 16

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ShapeError("layout", f"one of {', '.join(LAYOUTS)}", self.layout)
        for field, most in (
            ("tp", MAX_RANKS),
            ("pp", min(MAX_RANKS, self.model.num_layers)),
            ("block", MAX_BLOCK_TOKENS),
        ):
            value = self.block_tokens if field == "block" else getattr(self, field)
            if not 1 <= value <= most:
                raise ShapeError(field, f"a whole number from 1 to {most}", value)
        for sort in self.model.sorts:
            if sort.heads % self.tp and self.tp % sort.heads:
                raise ShapeError("tp", f"a divisor or multiple of {sort.heads} KV heads", self.tp)
            if self._block_tokens(sort) % sort.row_tokens:
                raise ShapeError("block", f"a multiple of {sort.row_tokens}", self.block_tokens)
        pages = sorted({share.page_nbytes for group in self.groups for share in group.shares})
        if len(pages) > 1 and len(self.groups) > 1 and self.layout[0] != "B":
            within = " or ".join(layout for layout in LAYOUTS if layout[0] == "B")
            raise ShapeError("layout", f"{within}, for pages of {pages} bytes", self.layout)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """KV cache groups of the whole model, the same on every rank."""
        return group_layers(
            [
                Paged(sort, self._block_tokens(sort), self._page_nbytes(sort))
                for sort in self.model.sorts
            ]
        )

    @property
    def ranks(self) -> int:
        """Workers of the engine."""
        return self.tp * self.pp

    def references(self, num_blocks: int) -> list[KVCacheReferences]:
        """Memory of every rank, stage by stage; rank ``r`` is tensor-parallel rank ``r % tp``."""
        groups = self.groups
        return [
            build_kv_cache_references(
                rank_memory(
                    groups,
                    self.layout,
                    num_blocks,
                    RankPlace(stage, rank, self.tp, (1 + number * self.tp + rank) * _RANK_SPACING),
                )
            )
            for number, stage in enumerate(pipeline_stages(self.model.num_layers, self.pp))
            for rank in range(self.tp)
        ]

    def __str__(self) -> str:
        return f"tp={self.tp},pp={self.pp},layout={self.layout},block={self.block_tokens}"

    def _block_tokens(self, sort: LayerSort) -> int:
        return sort.block_tokens or self.block_tokens

    def _page_nbytes(self, sort: LayerSort) -> int:
        rows = self._block_tokens(sort) // sort.row_tokens
        return max(1, sort.heads // self.tp) * rows * sort.row_nbytes


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
    {"tp": "tp", "pp": "pp", "layout": "layout", "block": "block_tokens"}
)


def parse_engine(text: str, model: ModelShape) -> EngineShape:
    """An engine from ``tp=4,pp=1,layout=BHLNC,block=16``; all keys have defaults.

    Raises:
        ShapeError: an unknown key (naming the nearest), one given twice, or a wrong value.
    """
    given: dict[str, int | str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS or not equals:
            hint = did_you_mean(key, _KEYS, cutoff=0.0)
            raise ShapeError("key", f"one of {', '.join(_KEYS)}", part, hint)
        if _KEYS[key] in given:
            raise ShapeError(key, "one value", part)
        given[_KEYS[key]] = value.upper() if key == "layout" else _whole(key, value)
    return EngineShape(model, **given)  # type: ignore[arg-type]


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ShapeError(key, "a whole number above 0", value or "nothing")
    return int(value)
