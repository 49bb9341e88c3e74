"""Requests as vLLM's, of which a test says only what it is about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def vllm_request(**known: Any) -> Any:
    """With what every request of vLLM's has, as it is unless it is asked for."""
    usual: dict[str, Any] = {
        "abort_immediately": False,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "num_in_flight_tokens": 0,
        "num_preemptions": 0,
        "prompt_embeds": None,
        "resumable": False,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**usual | known)
