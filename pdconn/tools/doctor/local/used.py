"""The transports that carried READs, from UCX's own output with ``UCX_PROTO_INFO=used``.

For each closed connection UCX prints a table of its protocols, with the number of uses::

    +-------+--------+-------------+-----------------------------------+
    | decode-0 intra-node cfg#1                                        |
    | remote memory read by ucp_get*(multi) into host memory from host |
    +-------+--------+-------------+-----------------------------------+
    | Count | Range  | Description |              Config               |
    +-------+--------+-------------+-----------------------------------+
    |   546 | 0..inf | zero-copy   | cma/memory                        |
    +-------+--------+-------------+-----------------------------------+

Without ``used``, tables list possible protocols without counts: those are skipped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.findings import Checked, Finding, checked, one_line, warning

SETTING = "UCX_PROTO_INFO=used"
_READ = "remote memory read by "
_ROW = re.compile(r"\|\s*(\d+)\s*\|[^|]*\|([^|]*)\|([^|]*)\|\s*$")
_MOST_NBYTES = 64 << 20
"""Bytes read from the end of a log."""


@dataclass(frozen=True, slots=True)
class UsedTransports:
    """The number of reads per transport; UCX counts each piece of a READ.

    Attributes:
        where: the log, or the host that was read.
        counts: by UCX's words, such as ``zero-copy cma/memory``.
    """

    where: str
    counts: tuple[tuple[str, int], ...] = ()


def used_transports(where: str, lines: Iterable[str]) -> UsedTransports:
    """Sum all tables of READs."""
    counts: Counter[str] = Counter()
    is_read = False
    for line in lines:
        if _READ in line:
            is_read = True
        elif " by ucp_" in line or " cfg#" in line:
            is_read = False
        elif is_read and (row := _ROW.search(line)) is not None:
            counts[one_line(f"{row[2].strip()} {row[3].strip()}")] += int(row[1])
    return UsedTransports(where, tuple(pair for pair in counts.most_common() if pair[1]))


def read_ucx_log(path: str) -> UsedTransports:
    """Read an engine's output.  UCX writes the file of ``UCX_LOG_FILE`` late, or not at all.

    Raises:
        BadQuestion: the file cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - _MOST_NBYTES))
            text = file.read().decode(errors="replace")
    except OSError as error:
        why = error.strerror or str(error)
        raise BadQuestion("--ucx-log", "a file to read", f"{path}: {why}") from None
    return used_transports(path, text.splitlines())


def listed_counts(counts: Iterable[tuple[str, int]]) -> str:
    """The transports with their number of reads: ``zero-copy cma/memory (546)``."""
    return ", ".join(f"{how} ({count})" for how, count in counts)


def seen_used(used: UsedTransports) -> str:
    """One line about a log."""
    named = listed_counts(used.counts) or "no transport that the log names"
    return f"{used.where}: UCX read by {named}"


def judge_used(logs: Iterable[UsedTransports]) -> Iterator[Finding]:
    """Findings about logs that name no transport."""
    for one in logs:
        if not one.counts:
            message = "no table of UCX with counts of reads: the log names no transport"
            remedy = (
                f"export {SETTING}; unset UCX_LOG_FILE; start that decode engine with its output "
                "in a file, let it pull, stop it (UCX prints where a connection ends), and give it"
            )
            yield warning("ucx-log.silent", one.where, message, remedy)


def check_used(logs: Iterable[UsedTransports]) -> Checked:
    """The check of all given logs."""
    found = tuple(logs)
    return checked("ucx-log", judge_used(found), *map(seen_used, found))
