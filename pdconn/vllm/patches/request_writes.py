"""What is written to vLLM's requests, and what they are relied on for.

A request is vLLM's own object, which a connector is given at its arrival, before its first look-up.
No hook lets a connector shorten a prompt, or take parameters back that only look like ours.

Written: ``prompt_token_ids``, ``num_prompt_tokens``, ``_all_token_ids``, ``max_tokens``,
``kv_transfer_params``.
Read: tokens that were computed, tokens in flight, and all that would be overlooked without
(:data:`NEEDED`).
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
     "prompt_embeds", "resumable", "skip_reading_prefix_cache")
)  # fmt: skip
"""What requests have, and what of a prompt or of its progress would be overlooked without."""


def num_computed(request: Any) -> int:
    """Tokens of the request that were computed; those of steps under way do not count.

    Where a drafter's tokens are accepted and the answer ends before the last of them, vLLM counts
    the others as computed, too, although the request never got them.
    """
    settled = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, min(int(settled), int(request.num_tokens)))


def shorten(request: Any, num_tokens: int) -> None:
    """Cut the prompt of a request that was not scheduled yet behind ``num_tokens`` tokens.

    The engine computes one token after it, and ends the request.  Block hashes stay: they are
    of full blocks, and vLLM uses no more of them than there are computed tokens.

    In an engine without a process of its own the frontend and best-of-n siblings hold the same
    list of tokens, so the request gets another.
    """
    request.prompt_token_ids = request.prompt_token_ids[:num_tokens]
    del request._all_token_ids[num_tokens:]
    request.num_prompt_tokens = num_tokens
    answer_one_token(request)


def answer_one_token(request: Any) -> None:
    """Have the engine end a request behind its first token."""
    request.max_tokens = 1


def ask_of_wrong_params(request: Any) -> None:
    """Have vLLM ask us of a request whose ``kv_transfer_params`` are no dict, as of a ticket.

    It looks into them next, and we say later that the ticket is wrong.
    """
    request.kv_transfer_params = {"do_remote_prefill": True}


def drop_wrong_params(request: Any) -> None:
    """Serve a request whose ``kv_transfer_params`` are no dict as if it had none.

    Clients write them; vLLM looks into them after us, and we do at the request's end.
    """
    params = request.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        error = TicketError("kv_transfer_params", "an object", params)
        log.warning("pdconn: ignored: %s request=%s", error, shown(request.request_id))
        request.kv_transfer_params = None


def check_requests(live: Live) -> None:
    """Whether requests have what is read of them, and a shortened one is as long as it says.

    Raises:
        ConfigError: naming what works in another way.
    """
    request = live.request(live.tokens)
    if lacking := sorted(NEEDED - set(vars(request))):
        raise changed("Request", ", ".join(lacking), "none")
    left = live.tokens - 1
    shorten(request, left)
    lengths = request.num_prompt_tokens, request.num_tokens, len(request.all_token_ids)
    expect("Request, tokens of a shortened prompt", (left,) * 3, lengths)
    expect("Request.max_tokens", 1, request.max_tokens)
    request.num_computed_tokens, request.num_in_flight_tokens = left, 1
    expect("Request.num_in_flight_tokens", left - 1, num_computed(request))
