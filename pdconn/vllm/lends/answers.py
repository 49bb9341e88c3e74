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

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdconn.protocol.prefix import lends_back
from pdconn.vllm.values import LendBack
from transport.errors import shown

log = logging.getLogger(__name__)

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
    """Answers that are lent, oldest first, within a share of the engine's blocks.

    Attributes:
        settings: the lease, and the share.
        has_states: whether the model keeps recurrent states.
        has_drafts: whether a drafter is used.
    """

    settings: LendBack
    has_states: bool = False
    has_drafts: bool = False
    _blocks: OrderedDict[str, int] = field(default_factory=OrderedDict)

    @classmethod
    def of(
        cls, settings: LendBack | None, has_states: bool, has_drafts: bool
    ) -> LentAnswers | None:
        """None where no answers are to be lent."""
        return None if settings is None else cls(settings, has_states, has_drafts)

    def __len__(self) -> int:
        return len(self._blocks)

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

    def make_room(self, request_id: str, num_blocks: int, num_gpu_blocks: int) -> Sequence[str]:
        """The requests whose answers are to be given up for that of another one."""
        most = self.settings.share * num_gpu_blocks
        if num_blocks > most:
            name = shown(request_id)
            log.debug("pdconn: answer not lent: blocks=%d most=%d of=%s", num_blocks, most, name)
            return (request_id,)
        self._blocks[request_id] = num_blocks
        ended = []
        while sum(self._blocks.values()) > most:
            ended.append(self._blocks.popitem(last=False)[0])
        return ended

    def give_up(self) -> list[str]:
        """All of them are to be given up."""
        ended = list(self._blocks)
        self._blocks.clear()
        return ended

    def ended(self, request_id: str) -> None:
        """Its lease has ended."""
        self._blocks.pop(request_id, None)
