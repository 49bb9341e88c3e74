"""The keys of clients: ``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``; and ours for engines.

Those of clients are compared in constant time.  Their file holds one key a line, so that a new one
can be added before the old one goes; empty lines and lines that begin with ``#`` are ignored.
"""

from __future__ import annotations

import hashlib
import hmac

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdconn.router.access.middlewares import PROBES
from pdconn.router.errors import BadSetting, Unauthorized
from pdconn.router.openai.requests import KEY_HEADER
from pdconn.sidechannel.credentials import SecurityError, read_private

OPTION = "--api-key-file"
ENGINE_OPTION = "--engine-key-file"
MOST_KEYS = 1024
_SCHEME = "bearer"


class ApiKeys:
    """The keys of a file.

    Raises:
        BadSetting: the file cannot be read, is open to others, or holds no good key.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._digests = _digests(path)

    def __len__(self) -> int:
        return len(self._digests)

    def reload(self) -> None:
        """Read the file again.

        Raises:
            BadSetting: as at the start; the keys of before stay.
        """
        self._digests = _digests(self._path)

    def allow(self, authorization: str | None) -> bool:
        """Whether a header's value holds a key.

        Every key is compared, and each as a digest, so that the time shows neither how much of a
        key was right nor how long it is.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode(errors="surrogateescape"))
        known = False
        for one in self._digests:
            known |= hmac.compare_digest(one, digest)
        return known and scheme.lower() == _SCHEME


class EngineKey:
    """The key that engines ask for (``vllm serve --api-key``), in a file of its own, if any.

    Raises:
        BadSetting: the file cannot be read, is open to others, or holds no single good key.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.reload()

    def authorization(self) -> str | None:
        """The value of ``Authorization``; None without a key."""
        return None if self._key is None else f"Bearer {self._key}"

    def reload(self) -> None:
        """Read the file again.

        Raises:
            BadSetting: as at the start; the key of before stays.
        """
        self._key = None if self._path is None else _only_key(self._path)


def requiring(keys: ApiKeys) -> Middleware:
    """A middleware that refuses requests without a key, but for probes: those have none."""

    @web.middleware
    async def require(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PROBES and not keys.allow(_authorization(request)):
            raise Unauthorized
        return await handler(request)

    return require


def _authorization(request: web.Request) -> str | None:
    """The header with the key; Anthropic's clients have one of their own."""
    given = request.headers.get("Authorization")
    key = request.headers.get(KEY_HEADER)
    return f"{_SCHEME} {key}" if given is None and key is not None else given


def _digests(path: str) -> tuple[bytes, ...]:
    return tuple(map(_digest, _read(OPTION, path, MOST_KEYS)))


def _only_key(path: str) -> str:
    [key] = _read(ENGINE_OPTION, path, 1)
    return key.decode()


def _read(option: str, path: str, most: int) -> list[bytes]:
    try:
        data = read_private(option, path)
    except SecurityError as error:
        raise BadSetting(error.field, error.expected, error.seen) from error
    lines = [line.strip() for line in data.splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not 1 <= len(keys) <= most:
        expected = f"1 to {most} keys in {path}, one a line" if most > 1 else f"one key in {path}"
        raise BadSetting(option, expected, f"{len(keys)} keys")
    for number, key in enumerate(keys, start=1):
        if not all(0x21 <= byte <= 0x7E for byte in key):
            expected = f"keys of printable ASCII without spaces in {path}"
            raise BadSetting(option, expected, f"another character in key {number}")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
