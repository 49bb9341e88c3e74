"""Errors that the router answers with, and errors that keep it from starting.

An engine's own error is not among them: it reaches the client unchanged.  A ``Refusal`` is the
router's own answer, in the shape that OpenAI clients and vLLM use::

    {"error": {"message": ..., "type": ..., "param": ..., "code": 400}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import msgspec

from transport.errors import FieldError, shown


class Refusal(Exception):
    """An error answer of the router itself."""

    status: ClassVar[int]
    kind: ClassVar[str]
    headers: Mapping[str, str] = {}
    param: str | None = None

    def message(self, *, name_engines: bool) -> str:
        """The message for the client; ``name_engines``: whether it may contain engine addresses."""
        del name_engines
        return str(self)

    def details(self, *, name_engines: bool) -> dict[str, object]:
        """Fields beside the four standard ones."""
        del name_engines
        return {}

    def body(self, *, name_engines: bool, anthropic: bool = False) -> bytes:
        """The answer as JSON; ``anthropic``: with the field that Anthropic's clients expect."""
        error = {
            "message": self.message(name_engines=name_engines),
            "type": self.kind,
            "param": self.param,
            "code": self.status,
            **self.details(name_engines=name_engines),
        }
        kind = {"type": "error"} if anthropic else {}
        return msgspec.json.encode({**kind, "error": error})


class FieldRefusal(FieldError, Refusal):
    """One field of a client's request is invalid."""

    def __init__(self, field: str, expected: object, seen: object, hint: str = "") -> None:
        super().__init__(field, expected, seen, hint)
        self.param = field


class BadBody(FieldRefusal):
    """The client's body is invalid."""

    status = 400
    kind = "BadRequestError"


class BadHead(FieldRefusal):
    """The head of the client's request is malformed or ambiguous."""

    status = 400
    kind = "BadRequestError"


class BadQuery(FieldRefusal):
    """The query of an admin page is invalid."""

    status = 400
    kind = "BadRequestError"


class BodyTooLarge(FieldRefusal):
    """The client's body is longer than ``--max-body-mib``."""

    status = 413
    kind = "RequestEntityTooLargeError"


class BodyTooSlow(FieldRefusal):
    """The client's body arrives too slowly."""

    status = 408
    kind = "RequestTimeoutError"


class UnsupportedEncoding(FieldRefusal):
    """The client's body is compressed."""

    status = 415
    kind = "UnsupportedMediaTypeError"
    headers: Mapping[str, str] = {"Accept-Encoding": "identity"}


class Busy(Refusal):
    """The router has reached a limit over all clients."""

    status = 503
    kind = "ServiceUnavailableError"
    headers: Mapping[str, str] = {"Retry-After": "1"}

    def __init__(self, why: str) -> None:
        super().__init__(f"the router is busy: {why}")


class TooManyPrefetches(Refusal):
    """The client, or all clients together, have too many prefetches under way."""

    status = 429
    kind = "RateLimitError"
    headers: Mapping[str, str] = {"Retry-After": "1"}

    def __init__(self, most_of_client: int, most: int) -> None:
        super().__init__(
            f"too many prefetches are under way: at most {most_of_client} of one client, and "
            f"{most} of all"
        )


class NotFound(FieldRefusal):
    """The router has no such path, or does not keep this request id."""

    status = 404
    kind = "NotFoundError"


class MethodNotAllowed(FieldRefusal):
    """The path exists, but not for this method."""

    status = 405
    kind = "MethodNotAllowedError"

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        listed = ", ".join(sorted(allowed))
        super().__init__("method", f"{listed} for {path}", method)
        self.headers = {"Allow": listed}


class UnknownModel(Refusal):
    """No engine serves this model."""

    status = 404
    kind = "NotFoundError"
    param = "model"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {shown(model)} does not exist.")


class NoPrompt(FieldRefusal):
    """The request was routed without hashing its prompt."""

    status = 409
    kind = "ConflictError"


class Unauthorized(Refusal):
    """The client sent no valid key of ``--api-key-file``."""

    status = 401
    kind = "AuthenticationError"
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}

    def __init__(self) -> None:
        super().__init__("Authorization: expected 'Bearer KEY' with a key of this service")


@dataclass(frozen=True, slots=True)
class EngineFailure:
    """An engine that failed this request, or was skipped because it is known to be down."""

    engine: str
    why: str


def _listed(failures: tuple[EngineFailure, ...]) -> str:
    return "; ".join(f"{one.engine}: {one.why}" for one in failures)


class NoEngineLeft(Refusal):
    """Every engine of a role is down, or failed while this request tried it."""

    status = 503
    kind = "ServiceUnavailableError"
    headers: Mapping[str, str] = {"Retry-After": "1"}

    def __init__(self, role: str, failures: tuple[EngineFailure, ...]) -> None:
        super().__init__(f"no {role} engine answers: {_listed(failures) or 'none is known'}")
        self.role = role
        self.failures = failures

    def message(self, *, name_engines: bool) -> str:
        """The message without engines and reasons, which may contain addresses."""
        return str(self) if name_engines else f"no {self.role} engine answers"

    def details(self, *, name_engines: bool) -> dict[str, object]:
        """The role, and each of its engines with the reason why it was not used."""
        if not name_engines:
            return {"role": self.role}
        engines = [{"engine": one.engine, "why": one.why} for one in self.failures]
        return {"role": self.role, "engines": engines}


class RequestTimedOut(Refusal):
    """``--request-timeout`` elapsed before an answer began."""

    status = 504
    kind = "GatewayTimeoutError"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no answer within {limit_s:g} s")


class UnfitGateway(Refusal):
    """The gateway sends requests in a way that no picker can serve."""

    status = 500
    kind = "InternalServerError"

    def __init__(self) -> None:
        super().__init__(
            "the gateway's external processor must have request_body_mode FULL_DUPLEX_STREAMED or "
            "BUFFERED, and be Envoy 1.33 or later"
        )


class RouterDefect(Refusal):
    """The router itself has failed; its log says how."""

    status = 500
    kind = "InternalServerError"

    def __init__(self) -> None:
        super().__init__("the router has failed; its log says how")


class HandoverRequired(Refusal):
    """``--require-prefill`` is set, and the request could have a ticket but has none."""

    status = 503
    kind = "ServiceUnavailableError"
    headers: Mapping[str, str] = {"Retry-After": "1"}

    def __init__(self, why: Enum) -> None:
        super().__init__(f"prefill is required, and the request was not handed over: {why.value}")


class BadSetting(FieldError, ValueError):
    """A setting of the router is invalid."""

    show: ClassVar[Callable[[object], str]] = repr


class CannotListen(Exception):
    """The address to listen on is not available."""

    def __init__(self, host: str, port: int, why: str) -> None:
        super().__init__(f"cannot listen on {host} port {port}: {why}")
        self.host = host
        self.port = port


class EnginesMissing(Exception):
    """``--wait`` elapsed and a role has no healthy engine."""

    def __init__(self, wait_s: float, failures: tuple[EngineFailure, ...]) -> None:
        super().__init__(f"engines not ready after {wait_s:g} s: {_listed(failures)}")
        self.failures = failures
