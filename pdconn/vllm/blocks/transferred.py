"""The blocks of a request in the groups that take part in transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdconn.vllm.blocks.recurrent_states import without_scratch
from pdconn.vllm.patches.pool.local_hits import held_tokens


@dataclass(frozen=True, slots=True)
class TransferBlocks:
    """A request's blocks, as vLLM passes them to connectors.

    Attributes:
        config: vLLM's KV cache configuration.
        by_group: ids by group of the engine; 0 is a hole.
        allocated: vLLM's blocks by group of the engine, if they have just been allocated.
    """

    config: Any
    by_group: tuple[list[int], ...]
    allocated: Sequence[Sequence[Any]] = ()

    @property
    def ids(self) -> tuple[list[int], ...]:
        """Ids by transferred group."""
        ids: tuple[list[int], ...] = self.config.select_transfer_block_ids(self.by_group)
        return ids

    def of_tokens(self, num_tokens: int) -> tuple[list[int], ...]:
        """Ids by transferred group of the blocks that hold ``num_tokens`` tokens."""
        return without_scratch(self.config.transfer_groups, self.ids, num_tokens)

    def held_tokens(self, num_local: int) -> tuple[int, ...]:
        """Tokens that each transferred group holds of a local hit of ``num_local``."""
        return held_tokens(self.config, self.allocated, num_local)
