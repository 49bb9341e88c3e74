"""Goodput while the load shifts: roles that follow it, beside each fixed ratio; three real engines.

    python -m tests.throughput.roles --json roles.json          (as root; 45 minutes)

Each engine has an equal part of the processor's time (:mod:`tests.throughput.roles.quota`), so that
three engines on two cores are three equal machines, and what one does not use no other gets.  The
load is open: prompts, then answers, then prompts again.  Its rates are such that the first kind
needs two engines that prefill, and the second two that decode, by what one engine takes, measured
at the start; or less, so that the best fixed ratio serves either with room.  Goodput is the
share of the requests of a phase that are answered as by one engine alone, within both targets.
Fixed ratios are measured for shorter, each phase by itself from an idle start, which flatters them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.model import TINY, write_model
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.proxy import admin_url, running_proxy
from pdconn.tools.lab.spec import EngineSpec
from pdconn.tools.output.table import table
from tests.throughput.roles.load import (
    Kind,
    Phase,
    Sender,
    Targets,
    outcome_of,
    served_rate,
    streams,
)
from tests.throughput.roles.quota import shares_of

ENGINES = 3
CORES = 0.5
"""Of each engine: 1.5 of two cores, and the rest for the router and the clients."""
PROBE_S = 30.0
"""Of a load, to see whether the best fixed ratio serves it."""
PROMPT, SHORT_ANSWER = 1500, 8
SHORT_PROMPT, ANSWER = 64, 150
BUSY = 1.25
"""Engines that a phase needs of the role that it is heavy on, at full use."""
BATCHES = (4, 8, 16, 32, 48)
"""Streams at which an engine's inter-token latency is measured."""
ITL_OF_LEAST = 2.0
"""The target, as a multiple of the latency at the smallest batch."""
TTFT_OF_PREFILL = 6.0


@dataclass(frozen=True)
class Row:
    """A way through all phases: goodput by phase, what was lost, and the changes of roles.

    Attributes:
        again: goodput of the last phase; None for a fixed ratio, where it is that of the first.
        whole: goodput of all requests, as if a fixed ratio had had the last phase too.
    """

    way: str
    minutes: float
    prompts: float
    answers: float
    again: float | None
    whole: float
    requests: int
    lost: int
    wrong: int
    changes: int
    first_error: str | None


@dataclass(frozen=True)
class Fleet:
    """The engines, and the load that was made for them."""

    urls: Sequence[str]
    directory: Path
    prompts: Kind
    answers: Kind
    targets: Targets

    def fixed(self, num_prefill: int, seconds: float) -> Row:
        """Each phase by itself, over a fixed ratio."""
        phases = self._sent((self.prompts, self.answers), num_prefill, seconds)
        return self._row(f"{num_prefill}:{len(self.urls) - num_prefill}", seconds, phases, 0)

    def served(self, kind: Kind, num_prefill: int) -> Kind:
        """A kind at a rate that this fixed ratio serves."""

        def goodput(per_s: float) -> float:
            (phase,) = self._sent((replace(kind, per_s=per_s),), num_prefill, PROBE_S)
            share = phase.goodput(self.targets)
            say = f"{kind.name}: {per_s:.1f} requests/s, goodput {100 * share:.1f} %"
            print(say, file=sys.stderr, flush=True)
            return share

        return replace(kind, per_s=served_rate(kind.per_s, goodput))

    def _sent(self, kinds: Sequence[Kind], num_prefill: int, seconds: float) -> list[Phase]:
        phases: list[Phase] = []
        prefill, decode = self.urls[:num_prefill], self.urls[num_prefill:]
        with running_proxy(prefill, decode, self.directory) as proxy:
            for kind in kinds:
                sender = Sender(Client(proxy))
                sender.send(kind.name, kind, seconds, seed=num_prefill)
                phases += sender.ended()
        return phases

    def followed(self, seconds: float) -> tuple[Row, list[dict[str, Any]]]:
        """All phases in a row, over roles that follow; and the changes."""
        args = ["--roles", "follow", "--ttft-target", f"{self.targets.ttft_s:.4f}"]
        args += ["--itl-target", f"{self.targets.itl_s:.4f}"]
        with running_proxy(self.urls, self.urls, self.directory, args=args) as proxy:
            sender = Sender(Client(proxy))
            kinds = (self.prompts, self.answers, self.prompts)
            for number, kind in enumerate(kinds):
                sender.send(f"{number}", kind, seconds, seed=10 + number)
                print(f"phase {number + 1} of {len(kinds)} sent", file=sys.stderr, flush=True)
            phases = sender.ended()
            changes = roles_of(proxy)["changes"]
        moved = [one for one in changes if one["what"] == "changed"]
        return self._row("followed", seconds, phases, len(moved)), changes

    def _row(self, way: str, seconds: float, phases: Sequence[Phase], changes: int) -> Row:
        goodput = [phase.goodput(self.targets) for phase in phases]
        # A fixed ratio has had two of three phases: the last is as good as the first.
        each = [*phases, phases[0]] if len(phases) == 2 else list(phases)
        kept = sum(len(phase.outcomes) * phase.goodput(self.targets) for phase in each)
        return Row(
            way,
            round(seconds / 60, 2),
            goodput[0],
            goodput[1],
            goodput[2] if len(goodput) > 2 else None,
            kept / sum(len(phase.outcomes) for phase in each),
            sum(len(phase.outcomes) for phase in phases),
            sum(phase.num_lost for phase in phases),
            sum(phase.num_wrong for phase in phases),
            changes,
            next((one.first_error for one in phases if one.first_error), None),
        )


def roles_of(proxy: str) -> dict[str, Any]:
    """What the proxy's page says of roles."""
    with urllib.request.urlopen(f"{admin_url(proxy)}/debug/state", timeout=30) as answer:
        roles: dict[str, Any] = json.loads(answer.read())["roles"]
    return roles


def specs_of(model: Path) -> list[EngineSpec]:
    """Engines of both roles, without prefix caching, so that each prompt is computed."""
    found = []
    for number in range(ENGINES):
        port, side = free_ports(2)
        transfer = {
            "kv_connector": "PdconnConnector",
            "kv_connector_module_path": "pdconn.vllm",
            "kv_role": "kv_both",
        }
        found.append(
            EngineSpec(
                name=f"both-{number}",
                model=model,
                port=port,
                side_channel_port=side,
                kv_transfer_config=transfer,
                one_process=True,
                kv_cache_mib=512,
                max_model_len=2048,
            )
        )
    return found


def made_for(engines: Sequence[Engine], directory: Path) -> Fleet:
    """The load and the targets, by what one engine takes."""
    alone = Client(engines[0].url)
    long = make_prompts([PROMPT] * 16, seed=81)
    short = make_prompts([SHORT_PROMPT] * BATCHES[-1], seed=82)
    long_right = [alone.complete(prompt, SHORT_ANSWER, top=1) for prompt in long]
    short_right = [alone.complete(prompt, ANSWER, top=1) for prompt in short]
    timed = [alone.stream(prompt, 1).first_token_s for prompt in long[:6]]
    prefill_s = statistics.median(timed)
    probe = Kind("probe", short, short_right, ANSWER, 1.0)
    steps = []
    for batch in BATCHES:
        with streams(alone, short[1:batch], ANSWER):
            time.sleep(1.0)
            steps.append(statistics.median(outcome_of(alone, probe, 0).token_s for _ in range(3)))
        if steps[-1] > ITL_OF_LEAST * steps[0]:
            break
    targets = Targets(TTFT_OF_PREFILL * prefill_s, ITL_OF_LEAST * steps[0])
    rising = np.maximum.accumulate(steps)  # as interpolation needs it, whatever the noise
    most = float(np.interp(targets.itl_s, rising, BATCHES[: len(steps)]))
    half_s = float(np.interp(most / 2, BATCHES[: len(steps)], rising))
    answers_per_s = BUSY * most / (ANSWER * half_s)
    print(
        f"prefill {prefill_s:.3f} s, steps {steps}, {most:.1f} streams, {targets}",
        file=sys.stderr,
        flush=True,
    )
    return Fleet(
        [engine.url for engine in engines],
        directory,
        Kind("prompts", long, long_right, SHORT_ANSWER, BUSY / prefill_s),
        Kind("answers", short, short_right, ANSWER, answers_per_s),
        targets,
    )


def render(rows: Sequence[Row]) -> str:
    """As a table."""
    lines = []
    for row in rows:
        shares = [
            "" if share is None else f"{100 * share:.1f} %"
            for share in (row.prompts, row.answers, row.again, row.whole)
        ]
        counts = [str(one) for one in (row.requests, row.lost, row.wrong, row.changes)]
        lines.append([row.way, *shares, *counts])
    headings = ("", "prompts", "answers", "prompts\nagain", "whole")
    return table((*headings, "requests", "lost", "wrong", "changes"), lines)


def main() -> int:
    """Exit status 1: with roles that follow a request was lost, or an answer wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of a phase, followed")
    parser.add_argument("--fixed-minutes", type=float, default=3.0, help="of a phase, fixed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    changes: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        specs = specs_of(write_model(directory / "model", TINY))
        with (
            running(specs, directory, cache=directory / "cache", timeout_s=600) as engines,
            shares_of([engine.pid for engine in engines], CORES),
        ):
            fleet = made_for(engines, directory)
            prompts = fleet.served(fleet.prompts, ENGINES - 1)
            answers = fleet.served(fleet.answers, 1)
            fleet = replace(fleet, prompts=prompts, answers=answers)
            row, changes = fleet.followed(60 * options.minutes)
            rows.append(row)
            for num_prefill in range(1, ENGINES):
                rows.append(fleet.fixed(num_prefill, 60 * options.fixed_minutes))
                print(render(rows), file=sys.stderr, flush=True)
    print(render(rows))
    if options.json:
        rates = {kind.name: kind.per_s for kind in (fleet.prompts, fleet.answers)}
        found = {"rows": [asdict(row) for row in rows], "moves": changes, "per_s": rates,
                 "targets": asdict(fleet.targets)}  # fmt: skip
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(bool(rows[0].lost or rows[0].wrong))


if __name__ == "__main__":
    sys.exit(main())
