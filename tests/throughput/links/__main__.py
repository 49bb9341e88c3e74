"""How often the router takes the better of pulling a prefix and computing it, by link.

    python -m tests.throughput.links --gbits 0.2 1 10 --json links.json

For each link two network namespaces are joined by a cable of its rate.  A holder in one lends, by
pdconn's lender, and a puller in the other pulls, by pdconn's puller over NIXL and UCX's TCP: as
many bytes as gpt-oss-120b keeps of the tokens, windows included.  Computing is not run: it takes
a known time, a fixed part and a rate, that scatters.

For each request the router's planner chooses; it begins with what it assumes of engines and links
it never saw, and learns what its own choices took.  Then both ways are timed.  Right is the
faster one, or either if they differ by at most 5 %.  Needs root and ``ip``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from pdconn.router.pulls.planner import PullPlanner
from pdconn.router.pulls.pull_choice import FLOOR_TOKENS
from pdconn.tools.output.table import table
from tests.multinode.namespaces import NetworkFailed, why_not
from tests.throughput.links.judged import Drawn, Engine, Judged, Outcome, Request, judge, outcome_of
from tests.throughput.links.machines import STEP, TOKEN_BYTES, SideDied, joined

EXIT_OK, EXIT_WRONG, EXIT_NOT_HERE = 0, 1, 2
TARGET = 0.95


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run is about; ``scatter``: of computing, above and below."""

    requests: int
    seed: int
    token_bytes: int
    prefill_rate: float
    fixed_s: float
    scatter: float
    shortest: int
    longest: int

    @property
    def drawn(self) -> Drawn:
        """Bounds of the requests."""
        return Drawn(saved=(self.shortest, self.longest))


@dataclass(frozen=True, slots=True)
class Link:
    """What came of one link; ``bytes_per_s`` is that of the longest pull, all included."""

    gbit_s: float
    bytes_per_s: float
    outcome: Outcome
    judged: list[Judged]


def measure(gbit_s: float, setting: Setting) -> Link:
    """Judge ``setting.requests`` requests over one link.

    Raises:
        NetworkFailed, SideDied: nothing is left running then.
    """
    rng = Random(setting.seed)
    requests = [setting.drawn.request(rng) for _ in range(setting.requests)]
    engine = Engine(
        Random(setting.seed + 1), setting.prefill_rate, setting.fixed_s, setting.scatter
    )
    rates = []
    with joined(gbit_s, setting.token_bytes, setting.drawn.most) as sides:

        def pull(request: Request) -> float:
            seconds, nbytes = sides.pull(request.held, request.there)
            rates.append((nbytes, nbytes / seconds))
            return seconds

        judged = judge(PullPlanner.from_floor(FLOOR_TOKENS), requests, engine, pull)
    return Link(gbit_s, max(rates)[1], outcome_of(judged), judged)


def render(links: Sequence[Link]) -> str:
    """A row per link."""
    head = [
        "link\nGbit/s", "seen\nMB/s", "requests", "pulling\nbetter", "pulled", "right",
        "right\nafter 10", "worst\nregret", "mean\nregret", "over\nbest",
    ]  # fmt: skip
    rows = []
    for link in links:
        one = link.outcome
        shares = (one.pull_better, one.pulled, one.right, one.right_warm)
        more = (one.worst_regret, one.mean_regret, one.over_best)
        rows.append([
            f"{link.gbit_s:g}", f"{link.bytes_per_s / 1e6:.0f}", str(one.requests),
            *(f"{100 * share:.1f} %" for share in (*shares, *more)),
        ])  # fmt: skip
    return table(head, rows)


def document(links: Sequence[Link], setting: Setting) -> dict[str, object]:
    """All as JSON."""
    return {"settings": asdict(setting), "links": [asdict(link) for link in links]}


def _setting(options: argparse.Namespace) -> Setting:
    return Setting(
        options.requests,
        options.seed,
        options.token_bytes,
        options.prefill_rate,
        options.fixed_ms / 1e3,
        options.scatter,
        options.shortest,
        options.longest,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--gbits", type=float, nargs="+", default=[0.2, 1, 10], help="of each link (%(default)s)")
    add("--requests", type=int, default=60, help="over each link (%(default)s)")
    add("--seed", type=int, default=17, help="of what is drawn (%(default)s)")
    add("--token-bytes", type=int, default=TOKEN_BYTES, help=f"in steps of {STEP} (%(default)s)")
    add("--prefill-rate", type=float, default=2500.0, help="tokens a second (%(default)s)")
    add("--fixed-ms", type=float, default=30.0, help="of any prompt's prefill (%(default)s)")
    add("--scatter", type=float, default=0.03, help="of prefill's times, as a part (%(default)s)")
    add("--shortest", type=int, default=FLOOR_TOKENS, help="tokens that a pull saves (%(default)s)")
    add("--longest", type=int, default=4096, help="tokens that a pull saves (%(default)s)")
    add("--json", type=Path, help="where to write all requests")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if each link reaches the target, 1 if not, 2 where no network can be made."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.token_bytes < STEP or options.token_bytes % STEP:
        parser.error(f"--token-bytes: expected a multiple of {STEP}, got {options.token_bytes}")
    if (reason := why_not()) is not None:
        print(f"links: {reason}", file=sys.stderr)
        return EXIT_NOT_HERE
    setting, links = _setting(options), []
    for gbit_s in options.gbits:
        print(f"{gbit_s:g} Gbit/s", file=sys.stderr, flush=True)
        try:
            links.append(measure(gbit_s, setting))
        except (NetworkFailed, SideDied) as error:
            print(f"links: {error}", file=sys.stderr)
            return EXIT_WRONG
    print(render(links))
    if options.json is not None:
        options.json.write_text(
            json.dumps(document(links, setting), indent=1) + "\n", encoding="utf-8"
        )
    return EXIT_OK if all(one.outcome.right >= TARGET for one in links) else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
