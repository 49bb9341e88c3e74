"""How many cases a property test draws: fewer in ``make test``, more in the long run."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

ASKED = os.environ.get("PDCONN_EXAMPLES")


def at_least(examples: int) -> int:
    """``examples``, or as many as ``PDCONN_EXAMPLES`` says if that is more."""
    return max(examples, int(ASKED)) if ASKED else examples


def drawn(examples: int) -> Any:
    """Draw that many cases."""
    return settings(
        max_examples=at_least(examples), deadline=None, suppress_health_check=list(HealthCheck)
    )
