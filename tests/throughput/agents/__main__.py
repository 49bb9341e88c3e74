"""What agents gain by ``keep`` and by prefetches, and what that costs others, with real engines.

    python -m tests.throughput.agents --json agents.json

Sessions take turns; their prompts grow by answers and by what tools returned.  In each pause a
flood of one-off prompts of twice the cache comes.  One prefill and one decode engine are behind
``pdconn proxy``, with KV events; ways are measured in turns, in another order from round to round,
each with fresh prompts:

without     nothing is kept
keep        each turn says ``keep``
prefetch    nothing is kept; before each turn its prompt is prefetched
no pause    the turns follow each other at once, without a flood
alone       the flood without sessions

Tokens hit are those of earlier turns, prompts and answers, that no engine computed again.  The
throughput of the flood is that of the pauses: there is the same load in all ways, and only what is
kept differs.  Each answer is compared with that of an engine alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pdconn.tools.lab.compare_answers import compare, make_prompts
from pdconn.tools.output.table import table
from tests.throughput.agents.engines import BLOCK, Fleet, fleet

WITHOUT, KEEP, PREFETCH, NO_PAUSE, ALONE = "without", "keep", "prefetch", "no pause", "alone"
WAYS = (WITHOUT, KEEP, PREFETCH, NO_PAUSE, ALONE)
ANSWER = 8
KEEP_S = 3600


@dataclass
class Seen:
    """What one way has shown, over all rounds.

    Attributes:
        first_s: seconds to the first token of later turns.
        flood_per_s: requests of the flood, by pause.
        earlier: tokens of later turns' prompts that earlier turns had.
        again: of these, those that an engine computed again.
        broken: promises.
        alone: later turns that decode served alone.
        wrong: answers that are not those of an engine alone.
    """

    first_s: list[float] = field(default_factory=list)
    flood_per_s: list[float] = field(default_factory=list)
    earlier: int = 0
    again: int = 0
    broken: int = 0
    alone: int = 0
    wrong: int = 0


@dataclass(frozen=True)
class Row:
    """One way; ``of_without`` and ``of_no_pause``: its median first token beside these."""

    way: str
    turns: int
    hit: float | None
    first_ms: float | None
    first_p90_ms: float | None
    of_without: float | None
    of_no_pause: float | None
    flood_per_s: float | None
    of_alone: float | None
    broken: int
    alone: int
    wrong: int


class Agents:
    """Sessions of one way and round.

    Args:
        made: the engines.
        seen: of the way; added to.
        options: sizes.
        way: one of ``WAYS``.
        number: of the round.
    """

    def __init__(
        self, made: Fleet, seen: Seen, options: argparse.Namespace, way: str, number: int
    ) -> None:
        self._made, self._seen, self._options, self._way = made, seen, options, way
        seed = 1000 * number + 100 * WAYS.index(way)
        count = 0 if way == ALONE else options.sessions
        self._prompts = make_prompts([options.first] * count, seed)
        self._seed = seed
        self._names = [f"{way} {number} {each}" for each in range(count)]
        self._asked: list[tuple[Sequence[int], object]] = []

    def run(self) -> None:
        """All turns, and the pauses between them."""
        for turn in range(self._options.turns):
            if turn and self._way != NO_PAUSE:
                self._seen.flood_per_s.append(self._pause(turn))
            if turn and self._way == PREFETCH:
                for prompt in self._prompts:
                    self._made.prefetch(prompt)
            self._turns(turn)
        for name in self._names:
            self._made.release(name)
        for prompt, answer in self._asked:
            want = self._made.alone.complete(prompt, ANSWER, top=1)
            self._seen.wrong += compare(want, answer) is not None  # type: ignore[arg-type]

    def _pause(self, turn: int) -> float:
        options = self._options
        count = round(options.flood * self._made.num_blocks * BLOCK / options.one_off)
        return self._made.flood(make_prompts([options.one_off] * count, self._seed + 50 + turn))

    def _turns(self, turn: int) -> None:
        """A turn of each session, one after the other."""
        keep = {"keep": KEEP_S} if self._way == KEEP else {}
        before = self._made.counts()
        held = self._made.routed("direct_requests_total", reason="prefix_held")
        further = make_prompts([self._options.growth] * len(self._prompts), self._seed + 10 + turn)
        new = 0
        for at, prompt in enumerate(self._prompts):
            taken = self._made.turn(prompt, ANSWER, session_id=self._names[at], **keep)
            self._asked.append((prompt, taken.answer))
            new += self._options.growth if turn else len(prompt)
            if turn:
                self._seen.first_s.append(taken.first_token_s)
            self._prompts[at] = (*prompt, *taken.answer.tokens, *further[at])
        if not turn or not self._prompts:
            return
        after = self._made.counts()
        computed = after.prefill_computed - before.prefill_computed
        computed += after.decode_computed - before.decode_computed
        total = sum(len(prompt) for prompt, _ in self._asked[-len(self._prompts) :])
        self._seen.earlier += total - new
        self._seen.again += max(0, computed - new)
        self._seen.broken += after.broken - before.broken
        now = self._made.routed("direct_requests_total", reason="prefix_held")
        self._seen.alone += int(now - held)


def measure(options: argparse.Namespace, work: Path) -> list[Row]:
    """Every way in each round."""
    longest = options.first + options.turns * (options.growth + ANSWER) + 2 * BLOCK
    longest = max(longest, options.one_off + BLOCK)
    seen = {way: Seen() for way in WAYS}
    args = ("--policy", options.policy, "--alone-below", str(options.alone_below))
    with fleet(work, options.blocks, longest, args) as made:
        for prompt in make_prompts([options.one_off] * 3, 9):
            made.turn(prompt, ANSWER)  # the engines greet each other
        for number in range(options.rounds):
            turned = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            for way in turned:
                Agents(made, seen[way], options, way, number).run()
                print(f"round {number}, {way}: {_short(seen[way])}", file=sys.stderr, flush=True)
    return rows_of(seen)


def _short(seen: Seen) -> str:
    firsts = " ".join(f"{1e3 * one:.0f}" for one in seen.first_s[-12:])
    floods = " ".join(f"{one:.2f}" for one in seen.flood_per_s[-4:])
    return f"first tokens {firsts} ms; flood {floods} /s; again {seen.again} of {seen.earlier}"


def rows_of(seen: dict[str, Seen]) -> list[Row]:
    """Medians, beside those of other ways of the same run."""
    firsts = {way: statistics.median(one.first_s) for way, one in seen.items() if one.first_s}
    floods = {
        way: statistics.median(one.flood_per_s) for way, one in seen.items() if one.flood_per_s
    }
    rows = []
    for way, one in seen.items():
        first, flood = firsts.get(way), floods.get(way)
        last = sorted(one.first_s)[int(0.9 * len(one.first_s))] if one.first_s else None
        rows.append(
            Row(
                way,
                len(one.first_s),
                1 - one.again / one.earlier if one.earlier else None,
                None if first is None else 1e3 * first,
                None if last is None else 1e3 * last,
                None if first is None else first / firsts[WITHOUT],
                None if first is None else first / firsts[NO_PAUSE],
                flood,
                None if flood is None else flood / floods[ALONE],
                one.broken,
                one.alone,
                one.wrong,
            )
        )
    return rows


def shown(rows: Sequence[Row]) -> str:
    """The table."""
    headings = ["way", "later\nturns", "tokens\nhit", "first token\nms", "p90\nms", "of\nwithout",
                "of no\npause", "flood\n1/s", "of flood\nalone", "broken", "by decode\nalone",
                "wrong"]  # fmt: skip
    cells = [
        [
            row.way,
            str(row.turns),
            _cell(row.hit, ".1%"),
            _cell(row.first_ms, ".0f"),
            _cell(row.first_p90_ms, ".0f"),
            _cell(row.of_without, ".2f"),
            _cell(row.of_no_pause, ".2f"),
            _cell(row.flood_per_s, ".2f"),
            _cell(row.of_alone, ".2f"),
            str(row.broken),
            str(row.alone),
            str(row.wrong),
        ]
        for row in rows
    ]
    return table(headings, cells)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=2400, help="tokens of a first prompt")
    parser.add_argument("--growth", type=int, default=120, help="tokens of a turn, and its answer")
    parser.add_argument("--flood", type=float, default=2.0, help="times the cache, in each pause")
    parser.add_argument("--one-off", type=int, default=1200, help="tokens of a prompt of the flood")
    parser.add_argument("--blocks", type=int, default=760, help=f"of {BLOCK} tokens, by engine")
    parser.add_argument("--policy", default="prefix", help="of the router")
    parser.add_argument("--alone-below", type=int, default=64, help="as of the router")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as work:
        rows = measure(options, Path(work))
    print(shown(rows))
    if options.json is not None:
        sizes = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"settings": sizes, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
