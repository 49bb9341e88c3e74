"""``pdconn score``: explains the prefix hits in a snapshot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdconn.router.prefix.snapshot import (
    BadSnapshot,
    Explained,
    explain_snapshot,
    read_snapshot,
)
from pdconn.tools.cli.common_options import BadArgument, check_file, configure_json, publish

_EPILOG = """\
For each pod of a snapshot: how much of the request's prefix it could serve from its
cache, and which KV cache group ends that, and where. The table shows the best pod
first; --json keeps the order of the file.

  hit_blocks  leading blocks of hash_block_tokens tokens that every group can serve
  stored      of those, blocks that have to be loaded from a store: no faster medium
              holds their full attention
  score       those blocks, each weighted by the best medium that holds it
  hit_tokens  what the engine would report as cached: it computes the last token of
              a prompt anyway, so this is the longest hit of at most num_tokens - 1
  may_pull    with pdconn proxy --pull-above: the pod that holds most of the request in its
              memory, and how many tokens more that is than in the pod's own
  cut_by      the group that ends the hit, and the block that it lacks; null for none

snapshot, version 1:
  {"version": 1, "hash_block_tokens": 16, "weights": {"gpu": 1.0, "storage": 0.5},
   "pods": {"a": {
      "groups": {"0": {"kind": "full_attention", "window": null, "block_tokens": 16},
                 "1": {"kind": "sliding_window", "window": 128, "block_tokens": 16}},
      "blocks": [{"group": 0, "medium": "gpu", "hashes": [1, 2, 3]},
                 {"group": 1, "medium": "gpu", "hashes": [2, 3]}]}},
   "request": {"hashes": [1, 2, 3], "num_tokens": 48}}

  kind is vLLM's kv_cache_spec_kind. Of the groups that "groups" does not describe,
  group 0 counts as full attention and others do not count. "group": null is for engines
  that do not name groups, and counts as full attention. A block of several hash blocks
  is listed by the hash of its last one. "eagle": true in a group: a hit needs one block
  more than it counts. "row_tokens": 256 in a pod: a hit that needs blocks of medium
  "storage" ends at a multiple of so many tokens. A running router serves such a snapshot
  on its admin pages, at /debug/route/REQUEST-ID?snapshot=1; its hashes compare with
  those of other snapshots of the same boot only.

examples:
  pdconn score snapshot.json
  pdconn score --json snapshot.json
  curl -s "localhost:9000/debug/route/$ID?snapshot=1" | pdconn score -

exit codes:
  0  scored
  2  the file cannot be read, or is not a snapshot
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pdconn score``."""
    parser.epilog = _EPILOG
    parser.add_argument("snapshot", metavar="SNAPSHOT.json", help="the file; - for stdin")
    configure_json(parser)


def run_command(args: argparse.Namespace) -> int:
    """Score a snapshot; returns 0 or 2 as in ``--help``."""
    try:
        check_file("--json", args.json)
        raw = sys.stdin.buffer.read() if args.snapshot == "-" else Path(args.snapshot).read_bytes()
        scored = explain_snapshot(read_snapshot(raw))
    except OSError as error:
        print(f"pdconn score: {args.snapshot}: {error.strerror}", file=sys.stderr)
        return 2
    except (BadArgument, BadSnapshot) as error:
        print(f"pdconn score: {error}", file=sys.stderr)
        return 2
    publish(ScoreReport(scored), args.json)
    return 0


@dataclass(frozen=True)
class ScoreReport:
    """The hits of a snapshot's pods, by name."""

    scored: Mapping[str, Explained]

    def text(self, width: int | None = None) -> str:
        """One line per pod, best first; ignores ``width``."""
        named = {_printable(name): pod for name, pod in self.scored.items()}
        longest = max((len(name) for name in named), default=3)
        pulls = {name: _pull(pod) for name, pod in named.items()}
        wide = max(len("may_pull"), *map(len, pulls.values())) if pulls else 8
        heading = f"hit_blocks  stored  hit_tokens     score  {'may_pull':<{wide}}  cut_by"
        lines = [f"{'pod':<{longest}}  {heading}"]
        for name, pod in sorted(named.items(), key=lambda item: -item[1].score):
            blocks = f"{pod.hit_blocks:>10}  {pod.stored_blocks:>6}"
            numbers = f"{blocks}  {pod.hit_tokens:>10}  {pod.score:>8g}"
            lines.append(f"{name:<{longest}}  {numbers}  {pulls[name]:<{wide}}  {_cut(pod)}")
        return "\n".join(lines)

    def document(self) -> object:
        """The pods with all fields."""
        return msgspec.to_builtins(self.scored)


def _printable(name: str) -> str:
    """A name without terminal escapes and line breaks."""
    return name if name.isprintable() else ascii(name)


def _pull(pod: Explained) -> str:
    return (
        "-" if pod.may_pull is None else f"{pod.may_pull.tokens} of {_printable(pod.may_pull.pod)}"
    )


def _cut(pod: Explained) -> str:
    if pod.cut_by is None:
        return "-"
    group = "" if pod.cut_by.group is None else f"group {pod.cut_by.group} "
    return f"{group}({pod.cut_by.kind}): {pod.cut_by.why}"
