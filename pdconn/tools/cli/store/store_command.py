"""``pdconn store ls | stat | verify | drop ROOT``: the options, and the work of each."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence

from pdconn.store.format.row import StoreLayout
from pdconn.store.inspect import (
    InspectError,
    RowAmount,
    open_existing,
    read_layout,
    remove_rows,
    rows_of,
    rows_older_than,
    summarize,
)
from pdconn.store.shelf.interface import Shelf, StoredRow
from pdconn.store.store_errors import FormatError, StoreError, StoreSettingError
from pdconn.store.store_keys import load_keys
from pdconn.store.verify import CheckedRow, RowState, check_rows
from pdconn.tools.cli.common_options import BadArgument, configure_json, publish
from pdconn.tools.cli.store.store_report import (
    ChecksReport,
    NamespacesReport,
    RemovalReport,
    RootReport,
    RowsReport,
)
from pdconn.tools.output.progress_line import ProgressLine
from pdconn.tools.output.units import duration

_EPILOG = """\
ROOT is the folder that "root" in the connector's "store" names. It may be in use:
what engines read and write meanwhile is not disturbed, and a row that goes is a miss.

examples:
  pdconn store ls /mnt/kv
  pdconn store stat /mnt/kv --json
  pdconn store verify /mnt/kv --drop-bad
  pdconn store drop /mnt/kv --older 7d --yes

exit codes:
  0    done
  1    verify found rows that are damaged or cannot be read, or the root cannot be read or written
  2    bad options, or ROOT is not the folder of a store
  130  interrupted by Ctrl-C
"""

_EPILOGS = {
    "ls": """\
  FA rows hold full attention, one for each canonical block of a prefix; WA rows what windows,
  chunks and states need where generation can resume. The longest prefix is one without a gap;
  the longest that can be resumed is known where engines left the layout of their rows.

examples:
  pdconn store ls /mnt/kv
  pdconn store ls /mnt/kv --rows --namespace 3f2a... --json
""",
    "stat": """\
  A writer is one start of an engine; its parts are rows that are being written, or were when
  it died: an engine with the same root removes those.

examples:
  pdconn store stat /mnt/kv
""",
    "verify": """\
  Every row's footer is checked, and every slab against its checksum where engines left the
  layout of the rows (layout.json); else the footers alone. Of encrypted rows --key-file checks
  that they were encrypted with its keys. --drop-bad removes rows that are proven to be damaged,
  and not those that cannot be read or decrypted.

examples:
  pdconn store verify /mnt/kv
  pdconn store verify /mnt/kv --drop-bad --json

exit codes:
  0    no row is damaged or unreadable
  1    some are, or the root cannot be read
  2    bad options, or ROOT is not the folder of a store
  130  interrupted by Ctrl-C
""",
    "drop": """\
  Removes rows and nothing else: of a namespace, unused for a while, both, or all. A row counts
  as used when one that depends on it was. Without --yes it only says what it would remove.

examples:
  pdconn store drop /mnt/kv --older 36h
  pdconn store drop /mnt/kv --namespace 3f2a... --yes
  pdconn store drop /mnt/kv --all --yes
""",
}
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands of ``pdconn store``."""
    parser.epilog = _EPILOG
    kinds = parser.add_subparsers(title="commands", metavar="WHAT", required=True)
    summaries: tuple[tuple[str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("ls", "list namespaces, or every row", _ls),
        ("stat", "total bytes, the share of windows, the budget, and rows being written", _stat),
        ("verify", "read every row and compare it with its checksums", _verify),
        ("drop", "remove rows", _drop),
    )
    added = {}
    for name, summary, work in summaries:
        sub = kinds.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=_EPILOGS[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("root", metavar="ROOT", help="the store's folder")
        configure_json(sub)
        if name != "stat":
            sub.add_argument("--namespace", metavar="NAME", help="only this namespace")
        sub.set_defaults(store=work, prog=sub.prog)
        added[name] = sub
    added["ls"].add_argument("--rows", action="store_true", help="list every row")
    added["verify"].add_argument(
        "--drop-bad", action="store_true", help="remove rows that are proven to be damaged"
    )
    added["verify"].add_argument(
        "--key-file", metavar="FILE", help="the store's key_file, for rows that are encrypted"
    )
    drop = added["drop"]
    drop.add_argument(
        "--older", metavar="AGE", help="rows unused for so long, e.g. 90s, 30m, 36h or 7d"
    )
    drop.add_argument("--all", action="store_true", help="all rows of the root")
    drop.add_argument("--yes", action="store_true", help="remove them; else only say what")


def run_command(args: argparse.Namespace) -> int:
    """Run the selected subcommand; errors of the root become exit codes."""
    try:
        code: int = args.store(args)
    except (BadArgument, InspectError, FormatError, StoreSettingError) as error:
        print(f"{args.prog}: {error}", file=sys.stderr)
        return 2
    except (StoreError, OSError) as error:
        print(f"{args.prog}: {error}", file=sys.stderr)
        return 1
    return code


def _ls(args: argparse.Namespace) -> int:
    with open_existing(args.root) as shelf:
        if args.rows:
            rows = sorted(
                rows_of(shelf, args.namespace),
                key=lambda row: (row.namespace, row.name.kind, row.name.index, row.name.key),
            )
            publish(RowsReport(rows, time.time()), args.json)
            return 0
        if args.namespace is not None:
            rows_of(shelf, args.namespace)  # raises for a missing namespace
        found = [
            one
            for one in summarize(args.root, shelf, time.time()).namespaces
            if args.namespace in (None, one.namespace)
        ]
    publish(NamespacesReport(found, time.time()), args.json)
    return 0


def _stat(args: argparse.Namespace) -> int:
    with open_existing(args.root) as shelf:
        found = summarize(args.root, shelf, time.time())
    publish(RootReport(found), args.json)
    return 0


def _verify(args: argparse.Namespace) -> int:
    keys = load_keys(args.key_file, "--key-file")
    bad: list[CheckedRow] = []
    counts = dict.fromkeys(RowState, RowAmount())
    dropped = RowAmount()
    with open_existing(args.root) as shelf:
        rows = rows_of(shelf, args.namespace)
        layouts, problems = _layouts(args.root, rows)
        progress = _RowProgress(args.prog, rows)
        for number, checked in enumerate(check_rows(shelf, rows, layouts, keys.rows)):
            counts[checked.state] += RowAmount(1, checked.row.nbytes)
            if checked.state in (RowState.DAMAGED, RowState.UNREADABLE):
                bad.append(checked)
            progress.show_rows(number + 1)
        progress.erase()
        if args.drop_bad:
            damaged = [one.row for one in bad if one.state is RowState.DAMAGED]
            dropped = remove_rows(args.root, shelf, damaged)
    if counts[RowState.ENCRYPTED].rows:
        problems.append(
            "encrypted rows were not opened: their checksums alone were compared; "
            + ("--key-file has other keys" if args.key_file else "give --key-file")
        )
    publish(ChecksReport(counts, bad, dropped, problems, args.drop_bad), args.json)
    return 1 if bad else 0


def _layouts(root: str, rows: Sequence[StoredRow]) -> tuple[dict[str, StoreLayout], list[str]]:
    """Layouts by namespace, and the problems of the others."""
    found: dict[str, StoreLayout] = {}
    problems = []
    for namespace in sorted({row.namespace for row in rows}):
        try:
            layout = read_layout(root, namespace)
        except InspectError as error:
            problems.append(f"{error}; only footers were checked")
            continue
        if layout is None:
            problems.append(f"namespace {namespace}: no layout.json; only footers were checked")
        else:
            found[namespace] = layout
    return found, problems


def _drop(args: argparse.Namespace) -> int:
    if args.all and (args.namespace is not None or args.older is not None):
        raise BadArgument("--all", "to stand alone", "--namespace or --older beside it")
    if not (args.all or args.namespace is not None or args.older is not None):
        raise BadArgument("rows to remove", "--namespace, --older or --all", "none of them")
    older_s = None if args.older is None else _seconds(args.older)
    with open_existing(args.root) as shelf:
        rows = rows_of(shelf, args.namespace)
        if older_s is not None:
            rows = _unused(rows, older_s, time.time())
        wanted = RowAmount.from_rows(rows)
        if not args.yes:
            return _would_drop(args, wanted)
        removed = _removed(args, shelf, rows)
    publish(RemovalReport(wanted, removed), args.json)
    return 0


def _would_drop(args: argparse.Namespace, wanted: RowAmount) -> int:
    publish(RemovalReport(wanted, None), args.json)
    print(f"{args.prog}: nothing was removed; add --yes to remove them", file=sys.stderr)
    return 2


def _removed(args: argparse.Namespace, shelf: Shelf, rows: Sequence[StoredRow]) -> RowAmount:
    progress = _RowProgress(args.prog, rows)
    try:
        return remove_rows(args.root, shelf, rows, progress.show_rows)
    finally:
        progress.erase()


def _unused(rows: Sequence[StoredRow], older_s: float, now: float) -> list[StoredRow]:
    """Rows that were not used for so long, by namespace."""
    by_namespace: dict[str, list[StoredRow]] = {}
    for row in rows:
        # As engines evict: a use in a far future is none, and would keep a row for ever.
        by_namespace.setdefault(row.namespace, []).append(row.believed(now))
    found = (rows_older_than(some, now - older_s) for some in by_namespace.values())
    return [row for some in found for row in some]


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise BadArgument("--older", "a time such as 90s, 30m, 36h or 7d", text or "nothing")
    return float(found[1]) * _UNITS_S[found[2]]


class _RowProgress:
    """The number of finished rows and the remaining time; updated a few times a second."""

    def __init__(self, prog: str, rows: Sequence[StoredRow]) -> None:
        self._line, self._total = ProgressLine(f"{prog}: "), len(rows)
        self._began = self._last = time.monotonic()

    def show_rows(self, count: int) -> None:
        """Show that ``count`` rows are finished."""
        now = time.monotonic()
        if not self._line.shown or now - self._last < 0.2:
            return
        self._last = now
        left_s = (now - self._began) * (self._total - count) / count
        self._line.show_step(f"{count:,} of {self._total:,} rows, {duration(left_s)} left")

    def erase(self) -> None:
        """Erase the line."""
        self._line.erase()
