"""The versions of vLLM that pdconn was tested with; others are refused unless a key allows them.

Assumptions about vLLM's internals are checked with any version
(:mod:`pdconn.vllm.patches.self_test`).
"""

from __future__ import annotations

import re

from pdconn.vllm.config import ConfigError

TESTED = (0, 32), (0, 34)
"""The first tested version, and the first untested one after it."""

KEY = "untested_vllm"


def check_version(version: str, is_allowed: bool) -> None:
    """Refuse an untested version of vLLM, unless it ``is_allowed``.

    Raises:
        ConfigError: ``version`` is outside of the range.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    first, end = TESTED
    if first <= release < end or is_allowed:
        return
    expected = f"from {first[0]}.{first[1]} on, before {end[0]}.{end[1]}"
    raise ConfigError("vLLM's version", expected, version, f'"{KEY}": true lets it run untested')
