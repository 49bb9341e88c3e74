"""Speculation: the tokens that decode must compute itself for correct KV of the drafter.

A drafter like EAGLE computes its KV at a position from the target's hidden state there and the
next token.  So if decode computes the last token of a prompt, all KV that it pulls is correct.  MTP
of several modules reads further: module ``k`` needs the next ``k + 1`` tokens, and behind the end
of the prompt prefill uses tokens that it has drafted::

    prompt of 8 tokens      0  1  2  3  4  5  6  7
    module 0 reads          1  2  3  4  5  6  7 (8)      right up to position 6
    module 1 reads          2  3  4  5  6  7 (8)(9)      right up to position 5
    module 2 reads          3  4  5  6  7 (8)(9)(10)     right up to position 4: decode pulls 0 to 4

vLLM rewrites such positions when a draft is rejected, from tokens of the last step; decode has no
last step.  So decode computes the last ``num_lookahead`` tokens of a prompt itself.

With a model with states decode must begin where prefill has ended, one token before the end of the
prompt, and prefill does not know that token.  EAGLE's KV at one position is then of another token,
which costs some drafts and changes no answer; several modules are refused.

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
