"""Which blocks ``verify: sample`` looks at: both sides know without a word.

One block in sixteen, by a hash of the request's name, the lender's group and the logical
block, so that over many requests every block, group and layer has its turn; and always
the blocks of the last two tokens.  Two, because a reader computes a prompt's last token
itself: the last block that it reads is the block of the one or of the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from pdconn.integrity.sums import I64, Terms, mixed

ONE_IN = 16


def counted(terms: Terms, group: int, block_tokens: int, blocks: I64) -> NDArray[np.bool_]:
    """Whether each logical block of the lender's ``group`` counts under ``terms``."""
    if not terms.sampled:
        return np.ones(len(blocks), dtype=bool)
    name = np.uint64(xxh3_64_intdigest(f"{group}:{terms.request}".encode()))
    chosen: NDArray[np.bool_] = mixed(name ^ mixed(blocks.astype(np.uint64))) % ONE_IN == 0
    for token in (terms.num_tokens - 1, terms.num_tokens - 2):
        chosen |= blocks == token // block_tokens
    return chosen
