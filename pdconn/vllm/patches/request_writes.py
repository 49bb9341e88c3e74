"""Writes to vLLM's requests, and the fields that are read from them.

vLLM passes its own request object to a connector at its arrival, before its first look-up.  No hook
lets a connector shorten a prompt, or remove invalid parameters.

Written: ``prompt_token_ids``, ``num_prompt_tokens``, ``_all_token_ids``, ``max_tokens``,
``kv_transfer_params``.
Read: computed tokens, tokens in flight, and the fields of :data:`NEEDED`.
Checked at the start by :func:`check_requests`.
Tested by ``tests/vllm/patches/test_request_writes.py``, and by ``tests/vllm/lends``.
"""

from __future__ import annotations

import logging
from typing import Any

from pdconn.protocol.errors import TicketError
from pdconn.vllm.patches.live import Live, changed, expect
from transport.errors import shown

log = logging.getLogger(__name__)

SOURCES = {
    "vllm.v1.request:Request.__init__": (61, 61),
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": (1616, 1845),
}

NEEDED = frozenset(
    ("abort_immediately", "cache_salt", "lora_request", "mm_features", "num_in_flight_tokens",
     "num_preemptions", "prompt_embeds", "resumable", "skip_reading_prefix_cache")
)  # fmt: skip
"""Fields of requests without which a property of a prompt or its progress would be missed."""


def num_computed(request: Any) -> int:
    """Computed tokens of the request, without those of steps in flight."""
    settled = request.num_computed_tokens - request.num_in_flight_tokens
    # If the answer ends before the last accepted draft token, vLLM counts more than there are.
    return max(0, min(int(settled), int(request.num_tokens)))


def shorten(request: Any, num_tokens: int) -> None:
    """Shorten the prompt of a request that was not scheduled yet to ``num_tokens`` tokens.

    The engine computes one token after it, and ends the request.
    """
    # A new list: in an engine without a process of its own, the frontend and best-of-n siblings
    # have the same one.  Block hashes stay: vLLM uses those of computed tokens only.
    request.prompt_token_ids = request.prompt_token_ids[:num_tokens]
    del request._all_token_ids[num_tokens:]
    request.num_prompt_tokens = num_tokens
    answer_one_token(request)


def answer_one_token(request: Any) -> None:
    """Make the engine end a request after its first output token."""
    request.max_tokens = 1


def ask_of_wrong_params(request: Any) -> None:
    """Replace ``kv_transfer_params`` that are no dict by those of a ticket.

    vLLM reads them next, and then asks us about the request, whose ticket is invalid.
    """
    request.kv_transfer_params = {"do_remote_prefill": True}


def drop_wrong_params(request: Any) -> None:
    """Remove ``kv_transfer_params`` that are no dict, which vLLM, and later we, could not read."""
    params = request.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        error = TicketError("kv_transfer_params", "an object", params)
        log.warning("pdconn: ignored: %s request=%s", error, shown(request.request_id))
        request.kv_transfer_params = None


def check_requests(live: Live) -> None:
    """Check that requests have the fields that are read, and that they can be shortened.

    Raises:
        ConfigError: naming the field that works differently.
    """
    request = live.new_request(live.tokens)
    if lacking := sorted(NEEDED - set(vars(request))):
        raise changed("Request", ", ".join(lacking), "none")
    left = live.tokens - 1
    shorten(request, left)
    lengths = request.num_prompt_tokens, request.num_tokens, len(request.all_token_ids)
    expect("Request, tokens of a shortened prompt", (left,) * 3, lengths)
    expect("Request.max_tokens", 1, request.max_tokens)
    request.num_computed_tokens, request.num_in_flight_tokens = left, 1
    expect("Request.num_in_flight_tokens", left - 1, num_computed(request))
