"""Ids of kernel blocks, where these are described instead of the engine's blocks.

vLLM's scheduler has blocks of its own size.  If a backend splits them, and a split block has other
bytes than an unsplit one (:mod:`pdconn.vllm.blocks.pages`), kernel blocks are described to peers
and stores, which are consecutive in memory::

    engine, 4 kernel blocks each      null   |      7      |      3      |
    kernel blocks                   0 0 0 0  | 28 29 30 31 | 12 13 14 15 |

Ids are translated where they leave the scheduler; pins and quarantine use the engine's own.  To a
peer an engine with split blocks is one with smaller blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdconn.protocol.ticket import BlockList
from registration.references import KVCacheReferences, RegistrationError


@dataclass(frozen=True, slots=True)
class Splits:
    """Kernel blocks of a block, by transferred group; empty: no group's blocks are split."""

    ratios: tuple[int, ...] = ()

    @classmethod
    def from_ranks(cls, groups: Iterable[Any], ranks: Sequence[KVCacheReferences]) -> Splits:
        """The splits by which the ranks of an engine describe its blocks.

        Args:
            groups: vLLM's groups that are transferred.
            ranks: every rank's memory, with as many groups.

        Raises:
            RegistrationError: ranks that describe blocks of a group in different parts.
        """
        ratios = []
        for number, group in enumerate(groups):
            described = {
                rank.groups[number].block_tokens for rank in ranks if rank.groups[number].data
            }
            if len(described) > 1:
                raise RegistrationError(
                    f"group {number}: tokens of a kernel block: expected the same on all ranks, "
                    f"got {sorted(described)}"
                )
            size: int = group.kv_cache_spec.block_size
            ratios.append(size // described.pop() if described else 1)
        return cls(tuple(ratios)) if any(ratio > 1 for ratio in ratios) else cls()

    def described(self, ids: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        """Ids of the described blocks, from the engine's; holes stay holes.

        >>> Splits((2, 1)).described([[0, 5], [6]])
        ([0, 0, 10, 11], [6])
        """
        if not self.ratios:
            return tuple(ids)
        return tuple(
            listed if ratio == 1 else _kernel_blocks(listed, ratio)
            for listed, ratio in zip(ids, self.ratios, strict=True)
        )

    def of_engine(self, blocks: Sequence[BlockList]) -> list[int]:
        """The engine's ids of described blocks, each once, without holes.

        >>> Splits((2, 1)).of_engine([BlockList(2, (11, 12)), BlockList(0, (6, 0))])
        [5, 6, 6]
        """
        ratios = self.ratios or (1,) * len(blocks)
        found: list[int] = []
        for listed, ratio in zip(blocks, ratios, strict=True):
            found += dict.fromkeys(block // ratio for block in listed.ids if block)
        return found


UNSPLIT = Splits()
"""For an engine whose blocks are described as they are."""


def _kernel_blocks(ids: Sequence[int], ratio: int) -> list[int]:
    blocks = np.fromiter(ids, np.int64, len(ids))[:, None]
    kernel = np.where(blocks == 0, 0, blocks * ratio + np.arange(ratio, dtype=np.int64))
    found: list[int] = kernel.ravel().tolist()
    return found
