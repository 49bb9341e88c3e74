"""Answers lent back: what decode holds of a conversation, for who computes its next turn.

With the key ``lend_back`` the answer to a request with ``kv_transfer_params`` carries others, which
its proxy puts into the next turn's request to prefill as they are::

    {"do_remote_decode": true, "pdconn": {"from": {...ticket of prompt and answer...}}}

The next prompt may begin with less of it, as where a template drops an earlier turn's reasoning.
So the ticket has *cuts*, with a digest each: prefill pulls up to the last one that its prompt has,
too.  Of full attention that may be at every block.  Windows and states are kept at the end, and
where the cache still has what the prompt ended with::

    prompt, reasoning, answer      ##################|~~~~~~~~~~~~~~|==========
    lent of full attention         ############################################
    lent of windows                             ####                       ####
    next prompt                    ##################|==========|######
                                   pulled up to here ^
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdconn.protocol.prefix import lends_back
from pdconn.vllm.values import LendBack

BlockIds = tuple[list[int], ...]
"""By transferred group; 0 is a hole."""


@dataclass(frozen=True, slots=True)
class LendableAnswer:
    """What is lent of a request that has ended.

    Attributes:
        num_tokens: of prompt and answer whose KV is there.
        blocks: that hold it.
        cuts: numbers of tokens, in ascending order, of which everything is there, too.
    """

    num_tokens: int
    blocks: BlockIds
    cuts: tuple[int, ...] = ()


@dataclass(slots=True)
class LentAnswers:
    """Which answers are lent.

    Attributes:
        settings: the lease, and the share.
        has_states: whether the model keeps recurrent states.
        has_drafts: whether a drafter is used.
    """

    settings: LendBack
    has_states: bool = False
    has_drafts: bool = False

    @classmethod
    def of(
        cls, settings: LendBack | None, has_states: bool, has_drafts: bool
    ) -> LentAnswers | None:
        """None where no answers are to be lent."""
        return None if settings is None else cls(settings, has_states, has_drafts)

    def asked(self, request: Any) -> bool:
        """Whether the request's answer is to be lent.

        Its proxy knows of tickets if it has ``kv_transfer_params``, and may decline.
        """
        params = request.kv_transfer_params
        if not params or params.get("do_remote_decode") or request.resumable:
            return False
        return lends_back(params) and not (self.has_states and self._moves_on(request))

    def _moves_on(self, request: Any) -> bool:
        """Whether the request's state is not that of the tokens that it has computed.

        A step under way, as asynchronous scheduling has one when a token ends an answer, writes
        the state behind that token in the place of ours.  With a drafter the state behind the
        accepted tokens is in a block of its own until the next step.
        """
        return self.has_drafts or request.num_in_flight_tokens > 0


def num_held(blocks: BlockIds) -> int:
    """Blocks of all groups, holes left out."""
    return sum(1 for ids in blocks for block in ids if block)
