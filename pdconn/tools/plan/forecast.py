"""The cost of a pull between two engines, computed by the planner of real pulls.

Two engine shapes describe their memory, a request gets blocks on both, and ``pdconn.planning`` lays
out the reads of every decode rank.  Only the time is an estimate, that of the slowest rank of
either side::

    decode rank    bytes it reads / bytes per second of its link
                   + its descriptors x seconds per descriptor
    prefill rank   bytes that all decode ranks read from it / bytes per second of its link
    either way     + the round trips of a pull, on the link where they take longer

Decode pulls all tokens of the prompt except the last, which it recomputes to have an input for
sampling.  Recurrent states move once, whatever the length of the prompt and of the hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Literal

import numpy as np

from pdconn.planning.plan import Moved, Need, Pairing
from pdconn.planning.template import Side, Template
from pdconn.protocol.ticket import BlockList
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.grouping import LayerGroup
from pdconn.tools.plan.link import Link
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.tables import Ids, block_tables
from registration.references import AttentionKind

MAX_PROMPT_TOKENS = 1 << 24
MAX_LAID_OUT_RUNS = 200_000
"""Limit of runs of a group on a rank that are laid out; more are only counted."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and runs that a pull moves, and bytes that it saves.

    ``saved_by_window`` are bytes before every window, ``saved_by_hits`` bytes that decode has
    cached.  ``state`` are bytes of states, included in ``nbytes``.
    """

    nbytes: int = 0
    runs: int = 0
    saved_by_window: int = 0
    saved_by_hits: int = 0
    state: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.nbytes + other.nbytes,
            self.runs + other.runs,
            self.saved_by_window + other.saved_by_window,
            self.saved_by_hits + other.saved_by_hits,
            self.state + other.state,
        )

    @property
    def mean_run_nbytes(self) -> float:
        """Bytes per run; 0 if nothing moves."""
        return self.nbytes / self.runs if self.runs else 0.0

    @property
    def clipping(self) -> float:
        """The factor by which full attention in every layer would increase the bytes."""
        return 1 + self.saved_by_window / self.nbytes if self.nbytes else 1.0

    def pull_seconds(self, link: Link) -> float:
        """Predicted time of one rank that pulls this."""
        return link.seconds_to_read(self.nbytes, self.runs)


@dataclass(frozen=True, slots=True)
class GroupForecast:
    """One KV cache group of decode.

    ``sources`` are the prefill ranks that any decode rank reads, ``their_block_tokens`` tokens per
    block there; ``cost`` is of all decode ranks, ``busiest`` of the slowest one over the whole
    pull; ``sent`` are the bytes read from each prefill rank.
    """

    number: int
    group: LayerGroup
    their_block_tokens: int
    sources: tuple[int, ...]
    cost: Cost
    busiest: Cost
    sent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank whose link determines the time of a pull, on one of the two sides."""

    side: Literal["prefill", "decode"]
    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """One pull by every rank of ``decode`` from the ranks of ``prefill``.

    ``link`` is a decode rank's, ``prefill_link`` a prefill rank's.  ``sent`` are the bytes read
    from each prefill rank, ``received`` the cost of each decode rank's pull.
    """

    prefill: EngineShape
    decode: EngineShape
    prompt_tokens: int
    hit_tokens: int
    link: Link
    prefill_link: Link
    ids: Ids
    groups: tuple[GroupForecast, ...]
    received: tuple[Cost, ...]
    sent: tuple[int, ...]
    seed: int = field(default=0)

    @property
    def total(self) -> Cost:
        """The cost of all decode ranks together."""
        return reduce(add, self.received)

    @property
    def busiest_rank(self) -> int:
        """The decode rank that takes longest."""
        return _busiest(self.received, self.link)

    @property
    def busiest(self) -> Cost:
        """The cost of that rank."""
        return self.received[self.busiest_rank]

    @property
    def seconds(self) -> float:
        """Predicted time of the pull."""
        return self.latency_s + self.slowest.seconds

    @property
    def latency_s(self) -> float:
        """The part of the time that is independent of bytes."""
        return max(self.link.latency_s, self.prefill_link.latency_s)

    @property
    def requests_per_s(self) -> float:
        """Pulls per second that the slowest rank can carry out back to back."""
        return 1 / self.slowest.seconds  # at least one token is pulled

    def over(self, link: Link) -> Forecast:
        """The same pull over another link of all ranks."""
        return replace(self, link=link, prefill_link=link)

    @property
    def slowest(self) -> SlowestRank:
        """The rank of either side that takes longest."""
        reads = SlowestRank("decode", self.busiest_rank, self.busiest.pull_seconds(self.link))
        most = max(self.sent)
        sends = self.prefill_link.seconds_to_send(most)
        return max(
            reads, SlowestRank("prefill", self.sent.index(most), sends), key=lambda one: one.seconds
        )

    def seconds_of(self, group: GroupForecast) -> float:
        """One group's part of ``slowest``."""
        slowest = self.slowest
        if slowest.side == "decode":
            return group.busiest.pull_seconds(self.link)
        return self.prefill_link.seconds_to_send(group.sent[slowest.rank])


def forecast(
    prefill: EngineShape,
    decode: EngineShape,
    prompt_tokens: int,
    hit_tokens: int,
    link: Link,
    *,
    prefill_link: Link | None = None,
    ids: Ids = "random",
    seed: int = 0,
    max_laid_out_runs: int = MAX_LAID_OUT_RUNS,
) -> Forecast:
    """Plan one request's pull for every decode rank, and sum the costs.

    Args:
        prompt_tokens: tokens of the prompt, all computed by prefill.
        hit_tokens: tokens at its start that decode has cached.
        link: of every decode rank, and of every prefill rank unless ``prefill_link`` is given.
        ids: order of each engine's block ids; random ones are drawn with ``seed``.
        max_laid_out_runs: maximum runs of a group on a rank that are laid out, not only counted.

    Raises:
        ShapeError: the prompt or the hit is too short or too long.
        Incompatible: the two engines cannot exchange KV.
    """
    _check_tokens(prompt_tokens, hit_tokens)
    until = prompt_tokens - 1
    lent = block_tables(prefill.groups, until, ids, seed)
    taken = block_tables(decode.groups, until, ids, seed + 1)
    need = Need.for_range(hit_tokens, until, taken.lists)
    theirs = prefill.references(lent.num_blocks)
    table: list[list[_Pulled]] = []
    for rank, ours in enumerate(decode.references(taken.num_blocks)):
        pairing = Pairing.between(ours, theirs, rank % decode.tp)
        groups_of_rank = range(len(ours.groups))
        table.append(
            [_pulled(pairing, n, need, lent.lists, max_laid_out_runs) for n in groups_of_rank]
        )
    received = tuple(reduce(add, (pulled.cost for pulled in row)) for row in table)
    busiest = _busiest(received, link)
    groups = tuple(
        _group(number, group, [row[number] for row in table], busiest, prefill)
        for number, group in enumerate(decode.groups)
    )
    sent = _sent([pulled for row in table for pulled in row], prefill)
    return Forecast(
        prefill, decode, prompt_tokens, hit_tokens, link, prefill_link or link, ids, groups,
        received, sent, seed,
    )  # fmt: skip


def _sent(pulled: Sequence[_Pulled], prefill: EngineShape) -> tuple[int, ...]:
    """Bytes read from each prefill rank."""
    sent: Counter[int] = sum((one.sent for one in pulled), Counter())
    return tuple(sent[rank] for rank in range(prefill.ranks))


def _check_tokens(prompt_tokens: int, hit_tokens: int) -> None:
    if not 2 <= prompt_tokens <= MAX_PROMPT_TOKENS:
        raise ShapeError("prompt", f"2 to {MAX_PROMPT_TOKENS} tokens", prompt_tokens)
    if not 0 <= hit_tokens < prompt_tokens - 1:
        most = prompt_tokens - 2
        raise ShapeError("hit", f"0 to {most} tokens, so that one is left to pull", hit_tokens)


def _busiest(received: Sequence[Cost], link: Link) -> int:
    return max(range(len(received)), key=lambda rank: received[rank].pull_seconds(link))


@dataclass(frozen=True, slots=True)
class _Pulled:
    """One group of one decode rank: its cost, and bytes by source rank."""

    cost: Cost
    sent: Counter[int]
    sources: frozenset[int]
    their_block_tokens: int | None


def _group(
    number: int, group: LayerGroup, pulled: Sequence[_Pulled], busiest: int, prefill: EngineShape
) -> GroupForecast:
    sizes = [one.their_block_tokens for one in pulled if one.their_block_tokens is not None]
    return GroupForecast(
        number,
        group,
        sizes[0] if sizes else prefill.attention_block_tokens,
        tuple(sorted(frozenset().union(*(one.sources for one in pulled)))),
        reduce(add, (one.cost for one in pulled)),
        pulled[busiest].cost,
        _sent(pulled, prefill),
    )


def _pulled(
    pairing: Pairing, group: int, need: Need, lent: Sequence[BlockList], max_laid_out_runs: int
) -> _Pulled:
    """The part of a pull for one group of one rank.

    Many small runs are counted, not laid out: their columns would not fit in memory.  The number is
    slightly high, since runs of neighbouring blocks may merge.
    """
    templates = tuple(one for one in pairing.templates if one.our_group == group)
    sent: Counter[int] = Counter()
    moved, runs = Moved(), 0
    is_state = pairing.ours.groups[group].kind is AttentionKind.STATE
    most = sum(
        (1 if is_state else -(-need.tokens[group].stop // one.sub_block_tokens)) * len(one.nbytes)
        for one in templates
    )
    laid_out = most <= max_laid_out_runs
    for part in [templates] if laid_out else [(one,) for one in templates]:
        used = part if laid_out else tuple(map(_as_one_run, part))
        plan = replace(pairing, templates=used).plan(need, lent)
        moved += plan.moved
        runs += plan.num_runs if laid_out else _num_runs(part[0], plan.moved)
        sent.update({rank: spans.total_bytes for rank, spans in plan.reads})
    cost = Cost(moved.nbytes, runs, moved.saved_by_window, moved.saved_by_hits, moved.state)
    sources = frozenset(one.their_rank for one in templates)
    return _Pulled(cost, sent, sources, templates[0].theirs.block_tokens if templates else None)


def _num_runs(template: Template, moved: Moved) -> int:
    """Runs of the sub-blocks that make up ``moved``."""
    return moved.nbytes // template.sub_block_nbytes * len(template.nbytes)


def _as_one_run(template: Template) -> Template:
    """The template with the bytes of every sub-block as one run."""
    first = slice(0, 1)

    def cut(side: Side) -> Side:
        start, stride, step = side.start[first], side.stride[first], side.step[first]
        return replace(side, start=start, stride=stride, step=step)

    nbytes = np.array([template.sub_block_nbytes], dtype=np.int64)
    return replace(template, ours=cut(template.ours), theirs=cut(template.theirs), nbytes=nbytes)
