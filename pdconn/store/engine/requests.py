"""What the scheduler's part knows of each request: where its load stands, what is saved of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from pdconn.protocol.ticket import BlockList
from pdconn.store.engine.lookups import Extras, Lookup, LookupAnswer
from pdconn.store.engine.saves import Saving
from pdconn.store.format.names import RowName


class LoadStage(Enum):
    """Where a request stands; ``OVER`` means that the store gives it nothing (more)."""

    NEW = auto()
    LOOKING = auto()
    FETCHING = auto()
    LOADING = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class StoredRequest:
    """A request that the store may serve.

    ``tokens`` are the ids of the prompt and, later, of the answer; the list grows.
    ``reads_files``: ``extras`` does, and so is asked for by look-ups alone, on their thread.
    """

    request: str
    tokens: Sequence[int]
    num_prompt_tokens: int
    extras: Extras
    may_load: bool
    reads_files: bool
    saving: Saving
    since: float
    stage: LoadStage = LoadStage.NEW
    lookup: Lookup | None = None
    fetch: int = 0
    num_local: int = 0
    tries: int = 0
    is_cut: bool = False
    known_extras: Sequence[bytes] | None = None

    def learn(self, answer: LookupAnswer) -> None:
        """Take over keys, and where the prompt parts from those saved, from a look-up done."""
        self.known_extras = answer.known_extras
        if len(answer.chain.keys) > len(self.saving.chain.keys):
            self.saving.chain = answer.chain
        if answer.full and self.saving.junction is None:
            self.saving.junction = answer.full - 1

    def extend(self, until: int) -> bool:
        """Hash as far as ``until`` tokens, of the answer too; whether the request has keys at all.

        What else keys depend on was found by the look-up, which may read files for it.
        """
        if self.known_extras is None:
            return False
        if until // self.saving.chain.block_tokens <= len(self.saving.chain.keys):
            return True
        self.saving.chain = self.saving.chain.extended(self.tokens, until, self.known_extras)
        return True

    def is_first_cut(self, answer: LookupAnswer) -> bool:
        """Whether staging held less than a look-up found, for the first time of this request."""
        is_first = answer.cut_nbytes > 0 and not self.is_cut
        self.is_cut = self.is_cut or is_first
        return is_first

    def is_unasked(self) -> bool:
        """Whether it is computed, as what was pulled is, without a look-up that saving needs."""
        is_new = self.stage is LoadStage.NEW and self.may_load
        return self.lookup is None and (is_new or self.reads_files)

    def awaits_keys(self) -> bool:
        """Whether it is being computed and what its keys depend on is not known yet."""
        is_asked = self.lookup is not None and self.lookup.answer is None
        if self.stage is LoadStage.LOOKING and self.lookup is not None:
            if self.lookup.answer is None:
                return True
            self.learn(self.lookup.answer)
            self.stage = LoadStage.OVER
        if self.known_extras is None and not self.reads_files:
            self.known_extras = self.extras()
        return self.known_extras is None and self.reads_files and (is_asked or not self.lookup)


@dataclass(frozen=True, slots=True)
class Save:
    """Rows that are being saved, and blocks that are pinned until the ranks have read them."""

    number: int
    blocks: tuple[BlockList, ...]
    rows: tuple[RowName, ...]


@dataclass(slots=True, eq=False)
class RequestFetch:
    """``left`` ranks have not answered; ``bad`` rows were missing or damaged."""

    request: str
    boundary: int
    held: int
    rows: tuple[RowName, ...]
    left: int
    since: float
    missing: set[RowName] = field(default_factory=set)
    damaged: set[RowName] = field(default_factory=set)
    is_dropped: bool = False
    is_loading: bool = False
