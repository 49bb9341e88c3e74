"""API keys of clients (``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``), and the engines' key.

Client keys are compared in constant time.  Their file holds one key per line, so that a new key
can be added before the old one is removed; empty lines and lines that begin with ``#`` are
ignored.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdconn.router.access.access_log import PROBES
from pdconn.router.openai.requests import KEY_HEADER
from pdconn.router.router_errors import BadSetting, Unauthorized
from pdconn.sidechannel.credentials import SecurityError, read_private

OPTION = "--api-key-file"
ENGINE_OPTION = "--engine-key-file"
MOST_KEYS = 1024
_SCHEME = "bearer"


class ApiKeys:
    """The client keys in a file.

    Raises:
        BadSetting: the file cannot be read, is accessible to other users, or holds no valid key.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._digests = _digests(path)

    def __len__(self) -> int:
        return len(self._digests)

    def reload_files(self) -> None:
        """Read the file again.

        Raises:
            BadSetting: as in the constructor; the previous keys stay valid.
        """
        self._digests = _digests(self._path)

    def allow(self, authorization: str | None) -> bool:
        """Whether the value of a header contains a valid key.

        Every key is compared, each as a digest, so that timing reveals neither the length of a key
        nor how much of it matched.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip().encode(errors="surrogateescape"))
        known = False
        for one in self._digests:
            known |= hmac.compare_digest(one, digest)
        return known and scheme.lower() == _SCHEME


class EngineKey:
    """The key that engines require (``vllm serve --api-key``), in a file of its own; optional.

    Raises:
        BadSetting: the file cannot be read, is accessible to other users, or holds not exactly one
            key.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.reload_files()

    def authorization(self) -> str | None:
        """The value of the ``Authorization`` header; None without a key."""
        return None if self._key is None else f"Bearer {self._key}"

    def reload_files(self) -> None:
        """Read the file again.

        Raises:
            BadSetting: as in the constructor; the previous key stays valid.
        """
        self._key = None if self._path is None else _only_key(self._path)


def requiring(keys: ApiKeys) -> Middleware:
    """A middleware that refuses requests without a valid key; probes need none."""

    @web.middleware
    async def require(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PROBES and not keys.allow(authorization_of(request.headers)):
            raise Unauthorized
        return await handler(request)

    return require


def authorization_of(headers: Mapping[str, str]) -> str | None:
    """The header that holds the key; clients of Anthropic's API use another one."""
    given = headers.get("Authorization")
    key = headers.get(KEY_HEADER)
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
