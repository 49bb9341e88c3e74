"""The rows that a store keeps of a prompt, and whether loading is faster than recomputing.

The rows are those of :mod:`pdconn.store.format`, computed for the shape of a model, so bytes are
exact.  Times are not: the store reads at one rate, and prefill computes at another::

    load       bytes that all ranks read up to the boundary / bytes per second of the store
    recompute  tokens up to the boundary / tokens per second of prefill

Both compute the rest of the prompt after the boundary, at least its last token.  Storing a prompt
pays off if loading is faster there and at every longer boundary.

A state is kept at the end of a pass.  In a model with states a row is a block of the engine, and a
prompt leaves the state at its last boundary; states at ends of earlier passes are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdconn.store.engine.lookups import Fitting, ShareSizes
from pdconn.store.engine.saves import Saving, rows_to_save
from pdconn.store.format.footer import footer_nbytes, row_nbytes
from pdconn.store.format.prompt_rows import Chain, Spacing, find_boundary, pieces, rows_needed
from pdconn.store.format.row import (
    KEY_NBYTES,
    RowKind,
    RowLayout,
    StoreLayout,
    share_layout,
    store_layout,
)
from pdconn.store.settings import StoreSettings
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.forecast import MAX_PROMPT_TOKENS
from pdconn.tools.plan.plan_errors import ShapeError

BLOCK_TOKENS = 256
STAGING = StoreSettings(root="", capacity=1).staging
"""Default staging bytes per rank."""
LONGEST_TOKENS = 1 << 20
"""The longest boundary that is tried for the break-even."""


@dataclass(frozen=True, slots=True)
class LoadSizes:
    """Bytes that all ranks together read of one row of each kind: slabs and footers."""

    fa: int
    wa: int

    @classmethod
    def of_shares(cls, whole: StoreLayout, shares: Sequence[StoreLayout]) -> LoadSizes:
        """From whole rows, and each rank's share of them."""
        return cls(
            sum(_read_nbytes(whole.fa, share.fa) for share in shares),
            sum(_read_nbytes(whole.wa, share.wa) for share in shares),
        )

    def load_nbytes(self, layout: StoreLayout, boundary: int) -> int:
        """Bytes of all rows up to a boundary."""
        rows = rows_needed(layout, 0, boundary)
        return sum(self.fa if kind is RowKind.FA else self.wa for kind, _ in rows)


@dataclass(frozen=True, slots=True)
class StoredShapes:
    """The rows of an engine: their layout, and their bytes when all ranks load them, and staged."""

    layout: StoreLayout
    load: LoadSizes
    staged: ShareSizes

    @classmethod
    def of_engine(
        cls, engine: EngineShape, block_tokens: int | None = None, *, is_packed: bool = False
    ) -> StoredShapes:
        """Of rows of ``block_tokens``; None for 256, or for an engine block with states.

        Of compressed rows (``is_packed``) every head is taken to fit.

        Raises:
            FormatError: canonical blocks are no multiple of the engine's blocks.
            ShapeError: rows that cannot be compressed.
        """
        ranks = engine.references(1)
        if block_tokens is None:
            block_tokens = engine.attention_block_tokens if engine.model.states else BLOCK_TOKENS
        layout = store_layout(ranks, block_tokens)
        shares = [share_layout([rank], block_tokens) for rank in ranks]
        sizes = ShareSizes.from_shares(shares)
        if is_packed:
            _check_bfloat16(engine)
            layout, shares = layout.packed(), [share.packed() for share in shares]
        return cls(layout, LoadSizes.of_shares(layout, shares), sizes)


def _check_bfloat16(engine: EngineShape) -> None:
    model = engine.model
    if model.item_nbytes is None or model.stored_as != "bfloat16":
        stored = "another format" if model.item_nbytes is None else model.stored_as
        raise ShapeError("store-compression", f"none for KV of {stored}", "exponents")


@dataclass(frozen=True, slots=True)
class StagingForecast:
    """Host memory of each rank for loading a prompt.

    Attributes:
        needed_nbytes: for the whole load; with less, a shorter part of the prompt is loaded.
        given_nbytes: the configured size.
        tokens: the largest saved boundary of the prompt for which ``given_nbytes`` suffice: a
            second request does not compute these.
    """

    needed_nbytes: int
    given_nbytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StoreForecast:
    """A prompt in a store, and its load by every rank of ``engine``.

    Attributes:
        layout: layout of whole rows.
        every: canonical blocks between saved boundaries; None: only the last boundary.
        boundary: tokens that a second request with this prompt does not compute.
        fa_rows, wa_rows: rows that the prompt leaves in the store, including its last boundary.
        load_nbytes: bytes that all ranks read for the boundary; replicated heads count once each.
        staging: host memory of each rank for the load.
        rate: bytes per second of the store, for all ranks together.
        prefill_rate: tokens per second that prefill computes; None if unknown.
        break_even: tokens of the shortest prompt from which on loading is faster; None without
            ``prefill_rate``, or if there is none.
    """

    engine: EngineShape
    layout: StoreLayout
    prompt_tokens: int
    every: int | None
    boundary: int
    fa_rows: int
    wa_rows: int
    load_nbytes: int
    staging: StagingForecast
    rate: float
    prefill_rate: float | None
    break_even: int | None

    @property
    def fa_row_nbytes(self) -> int:
        """Bytes of an FA row with its footer."""
        return row_nbytes(self.layout.fa)

    @property
    def wa_row_nbytes(self) -> int:
        """Bytes of a WA row with its footer; 0 without windows and states."""
        return 0 if self.layout.wa is None else row_nbytes(self.layout.wa)

    @property
    def fa_nbytes(self) -> int:
        """Bytes of the prompt's FA rows."""
        return self.fa_rows * self.fa_row_nbytes

    @property
    def wa_nbytes(self) -> int:
        """Bytes of the prompt's WA rows."""
        return self.wa_rows * self.wa_row_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that the prompt takes in the store."""
        return self.fa_nbytes + self.wa_nbytes

    @property
    def wa_share(self) -> float:
        """The share of WA rows in the prompt's bytes; 0 if it leaves none."""
        return self.wa_nbytes / self.nbytes if self.nbytes else 0.0

    @property
    def load_s(self) -> float:
        """Predicted time to load up to the boundary."""
        return self.load_nbytes / self.rate

    @property
    def recompute_s(self) -> float | None:
        """Predicted time to compute up to the boundary."""
        return None if self.prefill_rate is None else self.boundary / self.prefill_rate


def forecast_store(
    engine: EngineShape,
    prompt_tokens: int,
    rate: float,
    *,
    prefill_rate: float | None = None,
    window_every: int | str = "auto",
    block_tokens: int | None = None,
    staging: int = STAGING,
    is_packed: bool = False,
) -> StoreForecast:
    """The rows that one prompt leaves in a store, and the cost of loading them.

    Args:
        rate: bytes per second of the store.
        prefill_rate: tokens per second that prefill computes.
        window_every: as in the store's settings.
        block_tokens: of a canonical block; None for 256, or for an engine block with states.
        staging: bytes of host memory of each rank.
        is_packed: rows are compressed; the time to unpack them is not counted.

    Raises:
        ShapeError: a number is out of range, or rows cannot be compressed.
        FormatError: canonical blocks are no multiple of the engine's blocks.
    """
    _check(prompt_tokens, rate, prefill_rate, staging)
    rows = StoredShapes.of_engine(engine, block_tokens, is_packed=is_packed)
    layout, load, sizes = rows.layout, rows.load, rows.staged
    spacing = Spacing(None) if engine.model.states else Spacing.from_setting(layout, window_every)
    boundary = find_boundary(layout, prompt_tokens - 1, lambda kind, index: True)
    saved = _saved(layout, spacing, prompt_tokens)
    tokens = range(prompt_tokens - 1)
    staged = Fitting.largest(layout, sizes, staging, tokens, lambda kind, at: (kind, at) in saved)
    return StoreForecast(
        engine,
        layout,
        prompt_tokens,
        spacing.every,
        boundary,
        sum(kind is RowKind.FA for kind, _ in saved),
        sum(kind is RowKind.WA for kind, _ in saved),
        load.load_nbytes(layout, boundary),
        StagingForecast(
            sizes.staging_nbytes(rows_needed(layout, 0, boundary)), staging, staged.boundary
        ),
        rate,
        prefill_rate,
        None if prefill_rate is None else _break_even(layout, load, rate, prefill_rate),
    )


def _check(prompt_tokens: int, rate: float, prefill_rate: float | None, staging: int) -> None:
    if not 2 <= prompt_tokens <= MAX_PROMPT_TOKENS:
        raise ShapeError("prompt", f"2 to {MAX_PROMPT_TOKENS} tokens", prompt_tokens)
    for field, value in (("store-rate", rate), ("prefill-rate", prefill_rate)):
        if value is not None and not (math.isfinite(value) and value >= 1):
            raise ShapeError(field, "at least 1 a second", f"{value:g}")
    if staging < 1:
        raise ShapeError("store-staging", "at least 1 byte", staging)


def _saved(
    layout: StoreLayout, spacing: Spacing, prompt_tokens: int
) -> frozenset[tuple[RowKind, int]]:
    """Kinds and numbers of the rows that an engine saves of a prompt computed in one pass."""
    size = layout.block_tokens
    keys = tuple(number.to_bytes(KEY_NBYTES, "big") for number in range(prompt_tokens // size))
    saving = Saving(Chain(size, keys), prompt_tokens)
    names = rows_to_save(saving, layout, spacing, prompt_tokens, lambda name: True)
    return frozenset((name.kind, name.index) for name in names)


def _read_nbytes(whole: RowLayout | None, share: RowLayout | None) -> int:
    if whole is None or share is None or not share.sections:
        return 0
    return share.data_nbytes + footer_nbytes(len(whole.slabs), is_sealed=whole.is_sealed)


def _break_even(
    layout: StoreLayout, load: LoadSizes, rate: float, prefill_rate: float
) -> int | None:
    """Tokens of the shortest prompt from which on every boundary is loaded faster."""
    size, wa = layout.block_tokens, layout.wa
    fa_s, wa_s, compute_s = load.fa / rate, load.wa / rate, size / prefill_rate
    first = 1
    for blocks in range(1, LONGEST_TOKENS // size + 1):
        if blocks * compute_s <= blocks * fa_s + len(pieces(wa, blocks * size)) * wa_s:
            first = blocks + 1
    return first * size + 1 if first * size <= LONGEST_TOKENS else None
