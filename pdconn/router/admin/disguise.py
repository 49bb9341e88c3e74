"""Block hashes on the admin pages, replaced by keyed hashes with a key of this boot.

A block hash is a function of the prompt's tokens, so a reader of plain hashes could confirm a
guessed prompt without access to an engine.  With a key that never leaves this process a guess
cannot be checked, and equal hashes stay equal: hits and scores do not change.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable

import msgspec

from pdconn.router.prefix.snapshot import Asked, Blocks, Snapshot

KEY_NBYTES = 32
_NBYTES = 8


class Disguise:
    """Replaces block hashes by their HMAC-SHA256, cut to 64 bits.

    ``key`` is random by default; tests pass one.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(KEY_NBYTES) if key is None else key

    def disguise_hash(self, block_hash: int) -> int:
        """The replacement of one hash."""
        message = str(block_hash).encode()
        return int.from_bytes(hmac.digest(self._key, message, "sha256")[:_NBYTES], "big")

    def disguise_snapshot(self, plain: Snapshot) -> Snapshot:
        """The snapshot with replaced hashes, and equal scores."""
        known: dict[int, int] = {}

        def disguised(hashes: Iterable[int]) -> list[int]:
            for one in hashes:
                if one not in known:
                    known[one] = self.disguise_hash(one)
            return [known[one] for one in hashes]

        pods = {
            name: msgspec.structs.replace(
                pod,
                blocks=[Blocks(one.group, one.medium, disguised(one.hashes)) for one in pod.blocks],
            )
            for name, pod in plain.pods.items()
        }
        asked = Asked(disguised(plain.request.hashes), plain.request.num_tokens)
        return msgspec.structs.replace(plain, pods=pods, request=asked)
