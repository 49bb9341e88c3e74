"""What the proxy itself can refuse, and what keeps it from starting.

An engine's own error is not here: it reaches the client as the engine wrote it.
These are the errors whose author is the proxy, in the shape that OpenAI's
clients and vLLM's agree on::

    {"error": {"message": ..., "type": ..., "param": ..., "code": 400}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec


class Refusal(Exception):
    """The proxy answers this request itself, with an error."""

    status: ClassVar[int]
    kind: ClassVar[str]
    param: str | None = None

    def details(self) -> dict[str, object]:
        """Fields beside the four that every client knows."""
        return {}

    def body(self) -> bytes:
        """The answer's JSON."""
        error = {
            "message": str(self),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
            **self.details(),
        }
        return msgspec.json.encode({"error": error})


class BadBody(Refusal):
    """The client's body makes no sense: names the field, what fits, what came."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, field: str, expected: str, seen: str) -> None:
        super().__init__(f"{field}: expected {expected}, saw {seen}")
        self.param = field


class BodyTooLarge(Refusal):
    """The client's body is longer than the proxy was told to hold."""

    status = 413
    kind = "RequestEntityTooLargeError"

    def __init__(self, limit_nbytes: int) -> None:
        super().__init__(f"body: expected at most {limit_nbytes} bytes, saw more")
        self.param = "body"


class NoSuchRoute(Refusal):
    """The proxy does not serve this path with this method."""

    status = 404
    kind = "NotFoundError"

    def __init__(self, method: str, path: str, served: tuple[str, ...]) -> None:
        super().__init__(f"path: expected one of {', '.join(served)}, saw {method} {path}")
        self.param = "path"


@dataclass(frozen=True, slots=True)
class Miss:
    """An engine that was asked, or not asked because it is known to be down."""

    engine: str
    why: str


class NoEngineLeft(Refusal):
    """Every engine of a role is down, or went down while this request tried it."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, role: str, misses: tuple[Miss, ...]) -> None:
        seen = "; ".join(f"{miss.engine}: {miss.why}" for miss in misses)
        super().__init__(f"no {role} engine answers: {seen or 'none is known'}")
        self.role = role
        self.misses = misses

    def details(self) -> dict[str, object]:
        """The role, and each engine with the reason why it did not do."""
        engines = [{"engine": miss.engine, "why": miss.why} for miss in self.misses]
        return {"role": self.role, "engines": engines}


class BadSetting(ValueError):
    """A setting of the proxy makes no sense: names it, what fits, what came."""

    def __init__(self, field: str, expected: str, seen: object) -> None:
        super().__init__(f"{field}: expected {expected}, saw {seen!r}")
        self.field = field


class CannotListen(Exception):
    """The address the proxy should listen on cannot be had."""

    def __init__(self, host: str, port: int, why: str) -> None:
        super().__init__(f"cannot listen on {host} port {port}: {why}")
        self.host = host
        self.port = port


class EnginesMissing(Exception):
    """A role has no engine that answers, after as long a wait as was asked for."""

    def __init__(self, wait_s: float, misses: tuple[Miss, ...]) -> None:
        seen = "; ".join(f"{miss.engine}: {miss.why}" for miss in misses)
        super().__init__(f"engines not ready after {wait_s:g} s: {seen}")
        self.misses = misses
