"""A command for tests: says what it finds itself to be, and ends as its arguments say."""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

from tests.forked import sample_import

gc.unfreeze()
FOUND = {
    "arguments": sys.argv[1:],
    "own": os.environ.get("FORKED_OWN"),
    "imported by": sample_import.PID,
    "imported with": sample_import.SETTING,
    "pid": os.getpid(),
    "session": os.getsid(0),
    "temporary": tempfile.mkdtemp(),
    "random": random.random(),
    "input": sys.stdin.read(),
    "files": sorted(os.listdir("/proc/self/fd")),
    "frozen": gc.get_freeze_count(),
    "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
}


def main(how: str) -> None:
    print(json.dumps(FOUND), flush=True)
    print("said in passing", file=sys.stderr, flush=True)
    if how == "raise":
        raise ValueError("no such model")
    if how == "exit":
        atexit.register(print, "said at the end")
        sys.exit(7)
    if how == "exit with words":
        sys.exit("no such port")
    if how == "leave a child":
        words = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(words, start_new_session=True)
        print(child.pid, flush=True)
    if how == "sleep":
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
