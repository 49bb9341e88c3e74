"""What ``sample`` imports: which process did, and the setting that it found."""

from __future__ import annotations

import os

PID = os.getpid()
SETTING = os.environ.get("FORKED_SETTING", "none")
