"""The compiled part of the index: decoding events, and the blocks that pods hold.

``module`` is None where it was not built (no C++ compiler at installation), or where
``PDCONN_NO_EXTENSIONS=1`` is set; then Python does the same, several times slower
(``docs/benchmarks.md``).  Read it when it is needed: tests replace it.
"""

from __future__ import annotations

import os
from types import ModuleType

from pdconn.router.labels import IndexKind

VARIABLE = "PDCONN_NO_EXTENSIONS"

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
        module = _blocks


def index_kind() -> IndexKind:
    """What serves."""
    return IndexKind.PYTHON if module is None else IndexKind.COMPILED
