"""Runs a lender and a puller of ``examples/own_engine.py`` for each case, as a shell's pipe does.

    python -m tests.examples.forked '[{"lend": ["--corrupt"], "pull": []}]'

With ``"ticket"`` in place of ``"lend"`` there is no lender, and that is what comes by the pipe.

Every side is a process of its own and runs the example as ``__main__``.  They are forked from
here, where nothing but imports has happened: importing torch takes longer than all the rest.
Prints, of each case, both sides' exit status and what they wrote.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/own_engine.py"


def start(arguments: list[str], files: dict[int, int]) -> int:
    """The example with these arguments and standard files, in a process of its own."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        for number, file in files.items():
            os.dup2(file, number)
        os.closerange(3, 256)  # else the puller would keep the pipe open that it reads from
        sys.argv = [str(EXAMPLE), *arguments]
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - a forked process must not go on with its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(case: dict[str, Any]) -> dict[str, object]:
    """Both sides to their end."""
    ticket_out, ticket_in = os.pipe()
    written, printed = os.memfd_create("stderr"), os.memfd_create("stdout")
    started = {}
    if "ticket" in case:
        os.write(ticket_in, case["ticket"].encode() + b"\n")
    else:
        started["lend"] = start(["lend", *case["lend"]], {1: ticket_in, 2: written})
    started["pull"] = start(["pull", *case["pull"]], {0: ticket_out, 1: printed, 2: written})
    for file in (ticket_out, ticket_in):
        os.close(file)
    statuses = {
        side: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for side, pid in started.items()
    }
    texts = [os.pread(file, 1 << 20, 0).decode() for file in (printed, written)]
    return {**statuses, "stdout": texts[0], "stderr": texts[1]}


if __name__ == "__main__":
    runpy.run_path(str(EXAMPLE), run_name="imported")
    print(json.dumps([run(case) for case in json.loads(sys.argv[1])]))
