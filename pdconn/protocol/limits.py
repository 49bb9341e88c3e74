"""Bounds of what the other side may send.  Every real engine is far below them."""

from __future__ import annotations

MAX_RANKS = 4096
MAX_MESSAGES = 4096
"""Of one frame."""
MAX_TEXT = 512
MAX_GROUPS = 256
MAX_LAYER_CHUNKS = 1 << 16
"""Of one rank."""
MAX_TRAITS = 256
DIGEST_NBYTES = 16
