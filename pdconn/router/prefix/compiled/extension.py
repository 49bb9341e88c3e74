"""The compiled part of the index: events, the blocks that pods hold, and hashes of prompts.

``module`` is None where it was not built (no C++ compiler at installation), or where
``PDCONN_NO_EXTENSIONS=1`` is set; then Python does the same, several times slower
(``docs/benchmarks.md``).  Read it when it is needed: tests replace it.
"""

from __future__ import annotations

import os
from types import ModuleType

from pdconn.router.labels import IndexKind

VARIABLE = "PDCONN_NO_EXTENSIONS"
INTERFACE = 2
"""What ``module.cpp`` says of itself: a file of an earlier build may still lie there."""

module: ModuleType | None = None
why_not = ""
"""Why there is none."""

if os.environ.get(VARIABLE, "0") not in ("", "0"):
    why_not = f"{VARIABLE} is set"
else:
    try:
        from pdconn.router.prefix.compiled import _blocks
    except ImportError as error:
        why_not = f"not built, which takes g++ and Python's headers, or does not load ({error})"
    else:
        if getattr(_blocks, "INTERFACE", None) == INTERFACE:
            module = _blocks
        else:
            why_not = "built from other sources than these, so install pdconn again"


def index_kind() -> IndexKind:
    """What serves."""
    return IndexKind.PYTHON if module is None else IndexKind.COMPILED
