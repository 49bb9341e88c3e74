"""The share of its blocks that an engine which also decodes uses for prompts of other engines.

A prompt that is computed for another engine stays pinned until that engine has blocks for it.  Of
two engines that compute for each other, each may be full of prompts that wait for blocks of the
other.  So an engine that also decodes begins such a prompt only while all prompts that it computes
for others and lends are within a share of its blocks.  A prompt that waits has no blocks here, and
a claim for its prefix is given up (:mod:`pdconn.vllm.lends.waits`)::

    blocks   |######## lent ###|~~~ computed, to be lent ~~~|......................|
             |<------------------ the share --------------->|<--- to decode in --->|

Prompts begin in the order of arrival, so that shorter ones do not starve a long one.  A prompt that
is longer than the share begins when nothing else is lent.
"""

from __future__ import annotations

SHARE = 0.5
"""Of the blocks: each request needs as many at the engine that decodes as at the one before."""


class PromptShare:
    """Prompts that will be lent, from their admission to their end.

    Args:
        share: of the engine's blocks.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._held_back: dict[str, None] = {}
        self._computing: dict[str, int] = {}

    def __len__(self) -> int:
        """Prompts that are computed or wait."""
        return len(self._held_back) + len(self._computing)

    @property
    def holds_back(self) -> bool:
        """Whether a prompt waits for its share."""
        return bool(self._held_back)

    def may_begin_prompt(
        self, request_id: str, num_blocks: int, *, num_lent: int, num_gpu_blocks: int
    ) -> bool:
        """Whether a prompt of ``num_blocks`` may be given blocks now.

        Args:
            num_lent: blocks that leases pin.
            num_gpu_blocks: of the engine.
        """
        if request_id in self._computing:  # it was preempted meanwhile
            return True
        taken = num_lent + sum(self._computing.values())
        is_first = next(iter(self._held_back), request_id) == request_id
        fits = not taken or taken + num_blocks <= self._share * num_gpu_blocks
        if not (is_first and fits):
            self._held_back.setdefault(request_id)
            return False
        self._held_back.pop(request_id, None)
        return True

    def begin_prompt(self, request_id: str, num_blocks: int) -> None:
        """Record that a prompt was given ``num_blocks`` blocks."""
        self._held_back.pop(request_id, None)
        self._computing[request_id] = num_blocks

    def end_prompt(self, request_id: str) -> None:
        """Forget a request that leaves the engine; its lease counts as lent blocks."""
        self._held_back.pop(request_id, None)
        self._computing.pop(request_id, None)
