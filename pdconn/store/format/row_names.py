"""How rows and namespaces are named in the store, so that an encrypted store's names tell nothing.

The key of a row is a digest of its tokens, so someone who can list a folder could test a guess of a
prompt.  With a secret every name is an HMAC-SHA256 (RFC 2104) in place of it::

                  without a secret           with one
    row           SHA-256(parent | tokens)   HMAC(parent | tokens)
    namespace     as it is                   sealed-<id of the secret>-<HMAC>
    tenant        SHA-256(cache salt)        HMAC(cache salt)

All else (catalogues, accounts, eviction, listings) works with these names as they are, and needs no
secret.  The secret outlives the keys that rows are encrypted with: a row that an older key has
encrypted is found by the same name.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

from pdconn.store.format.prompt_rows import Chain
from pdconn.store.format.row import TENANT_NBYTES

SEALED = "sealed-"
"""Namespaces of encrypted rows begin with it."""


@dataclass(frozen=True, slots=True)
class RowNames:
    """Names of one store's rows; ``secret`` is empty where rows are not encrypted."""

    secret: bytes = field(default=b"", repr=False)

    @property
    def prefix(self) -> str:
        """How namespaces begin that are named with this secret; empty without one."""
        return f"{SEALED}{self._label(b'id', b'')[:4].hex()}-" if self.secret else ""

    def in_store(self, namespace: str) -> str:
        """The namespace's name in the store."""
        if not self.secret:
            return namespace
        return self.prefix + self._label(b"namespace", namespace.encode())[:16].hex()

    def tenant(self, cache_salt: str | None) -> bytes:
        """The label of the tenant that sends ``cache_salt``, 8 bytes; none without a salt."""
        if not cache_salt:
            return b""
        return self._label(b"tenant", cache_salt.encode())[:TENANT_NBYTES]

    def chain(self, block_tokens: int, cache_salt: str | None = None) -> Chain:
        """The chain of a prompt of which no key is known yet."""
        secret = self._label(b"rows", b"") if self.secret else b""
        return Chain(block_tokens, (), self.tenant(cache_salt), secret)

    def _label(self, what: bytes, text: bytes) -> bytes:
        # One of these labels is no beginning of another, so no two inputs are the same.
        data = b"pdconn store: " + what + b"\0" + text
        if not self.secret:
            return hashlib.sha256(data).digest()
        return hmac.digest(self.secret, data, "sha256")
