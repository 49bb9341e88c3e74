"""Speculation: which tokens decode must compute itself for the drafter's KV to be right.

A drafter of EAGLE's kind reads, for its KV at a position, the target's hidden state there and the
token after it.  So of a prompt whose last token decode computes, all that it pulls is right.  MTP
of several modules reads further: module ``k`` needs the ``k + 1`` next tokens, and after the end of
the prompt prefill takes what it has drafted itself::

    prompt of 8 tokens      0  1  2  3  4  5  6  7
    module 0 reads          1  2  3  4  5  6  7 (8)      right up to position 6
    module 1 reads          2  3  4  5  6  7 (8)(9)      right up to position 5
    module 2 reads          3  4  5  6  7 (8)(9)(10)     right up to position 4: decode pulls 0 to 4

vLLM alone writes such positions again when a draft is rejected, from tokens that it remembers of
the last step; decode has no last step.  Therefore decode leaves the last ``num_lookahead`` tokens
of a prompt to itself.

Of a model with states decode must begin where prefill ended, one token before the end of the
prompt, and that token is not known to prefill.  EAGLE's KV of one position is then that of another
token, which costs some drafts and no answer; more modules would cost more, and are refused.

Sources: vLLM's ``num_prefill_lookahead_tokens`` and ``MultiModuleMTPSpeculator``.
"""

from __future__ import annotations

from typing import Any

from pdconn.vllm.config import ConfigError


def num_lookahead(config: Any, has_states: bool) -> int:
    """How many tokens at a prompt's end decode computes, at least one.

    Raises:
        ConfigError: a model with states, and MTP of several modules.
    """
    count = max(1, int(config.num_prefill_lookahead_tokens))
    if has_states and count > 1:
        hint = (
            f"MTP modules that read {count} tokens ahead would be handed over without those, as "
            f"states are of all of the prompt but its last token; set num_speculative_tokens to 1"
        )
        raise ConfigError("speculative_config", "MTP of one module", "of several", hint)
    return count
