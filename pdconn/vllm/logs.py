"""Our log lines in vLLM's log: same handlers, same format, same level."""

from __future__ import annotations

import logging

_OURS = ("pdconn", "transport", "registration")


def join_vllms_log() -> None:
    """Let our loggers write where vLLM's does, unless the user gave them handlers."""
    theirs = logging.getLogger("vllm")
    for name in _OURS:
        ours = logging.getLogger(name)
        if not ours.handlers and theirs.handlers:
            ours.handlers = list(theirs.handlers)
            ours.setLevel(theirs.level)
            ours.propagate = False
