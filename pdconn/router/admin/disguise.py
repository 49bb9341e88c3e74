"""Block hashes as the admin pages show them: under a key of this boot.

A block hash follows from a prompt's tokens alone, so a reader of the plain hashes can confirm a
guessed prompt without asking any engine.  Under a key that never leaves this process a guess
cannot be checked, and equal hashes still are equal: hits and scores come out the same.
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

    ``key`` is drawn at random; tests give one.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(KEY_NBYTES) if key is None else key

    def of(self, block_hash: int) -> int:
        """What stands for one hash."""
        message = str(block_hash).encode()
        return int.from_bytes(hmac.digest(self._key, message, "sha256")[:_NBYTES], "big")

    def snapshot(self, plain: Snapshot) -> Snapshot:
        """The same snapshot with other hashes, and with equal scores."""
        known: dict[int, int] = {}

        def disguised(hashes: Iterable[int]) -> list[int]:
            for one in hashes:
                if one not in known:
                    known[one] = self.of(one)
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
