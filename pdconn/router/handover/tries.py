"""Classifies engines' answers: which engine is at fault, and which is asked next.

As in Envoy, llm-d's sidecar and httpx: a status that means "try elsewhere" is retried on another
engine while no byte of an answer has been sent; every other answer goes to the client.
``docs/router.md`` has the rules as a table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec import Raw

from pdconn.router.fleet.engine_client import (
    AnswerAborted,
    ConnectFailed,
    ConnectionLost,
    EngineAnswer,
    EngineTimedOut,
    IdleConnectionLost,
    OutOfResources,
)
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.fleet.health import Health
from pdconn.router.fleet.member import Role
from pdconn.router.labels import RequestEnd
from pdconn.router.openai.bodies import AnswerReader
from pdconn.router.openai.first_output import FirstOutput, OutputSearch
from pdconn.router.openai.requests import kind_of
from pdconn.router.router_errors import EngineFailure, HandoverRequired, NoEngineLeft
from pdconn.router.router_metrics import RouterMetrics
from pdconn.router.routing.policy import Candidate, Decision
from pdconn.router.routing.request_events import Failed, StepKind
from pdconn.router.routing.routed_request import RoutedRequest

ELSEWHERE = frozenset({429, 500, 502, 503, 504})
"""Statuses after which another engine may succeed."""
OK = 200
HELD_S = 1.0
"""How long the beginning of an answer is held back for output.

vLLM begins most answers with their first token, and aborts at once while it drains.  Longer waits
are for clients that need the beginning: comments that keep a connection alive, the id of a response
that is computed in the background, a message whose reasoning is hidden.
"""
INTERNAL_ERROR = 500
"""With a ticket, also a failed pull, where ``kv_load_failure_policy`` is ``fail``."""
MOST_BROKEN = 2
"""Engines of a role that one request may break: it may be the cause, and would break them all."""


class _OursOnly(msgspec.Struct):
    pdconn: Raw = Raw(b"null")


def status_of(status: int, headers: Mapping[str, str], first_chunk: bytes) -> int:
    """The status of an answer that has begun: for an error event, the status in it.

    vLLM sends 200 before some failures: a failed pull, or a dead core, is the first and only event
    of a stream.

    >>> stream = {"Content-Type": "text/event-stream"}
    >>> status_of(200, stream, b'data: {"error": {"code": 503}}\\n\\n')
    503
    """
    reader = AnswerReader(status, headers)
    if reader.is_stream:
        reader.read_chunk(first_chunk)
    return reader.error or status


async def await_output(answer: EngineAnswer) -> None:
    """Wait until an answer holds output, or an error, so that another engine need not be asked.

    What has arrived of it is held back until then, for ``HELD_S`` at most.

    Raises:
        AnswerAborted: the engine has ended the request.
        ConnectionLost: the connection broke before.
    """
    if answer.status != OK:
        return await answer.await_first()
    search = OutputSearch(answer.headers)

    async def search_on() -> FirstOutput:
        piece = await answer.await_more()
        # No other task has run since: all that has arrived has been read.
        return search.read(piece, is_whole=answer.is_complete)

    found = await search_on()
    if found is FirstOutput.NOT_YET:
        try:
            async with asyncio.timeout(HELD_S):
                while found is FirstOutput.NOT_YET:
                    found = await search_on()
        except TimeoutError:
            # This process may have been late itself: what has arrived counts.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0):
                    found = await search_on()
    if found is FirstOutput.ABORTED:
        raise AnswerAborted("it ended the request without any output")


def retry_after_s(value: str | None, now: datetime | None = None) -> float | None:
    """The seconds of a ``Retry-After`` header, a number or a date; None for neither.

    >>> retry_after_s("7"), retry_after_s("soon"), retry_after_s(None)
    (7.0, None, None)
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


def may_repeat(ticket: Raw | None) -> bool:
    """Whether a body with this ticket may reach an engine twice.

    Our connector claims before it reads and confirms the claim afterwards, so a second use of a
    ticket is refused.  Other connectors read the blocks whatever they hold by then.

    >>> may_repeat(Raw(b'{"remote_block_ids": [1]}')), may_repeat(Raw(b'{"pdconn": {"v": 1}}'))
    (False, True)
    """
    if ticket is None:
        return True
    try:
        ours = msgspec.json.decode(ticket, type=_OursOnly).pdconn
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return kind_of(ours) == "an object"


_TOO_MANY = 429
_NOT_IMPLEMENTED = 501
_OF_THE_KEY = (401, 403)


def end_of(answer: AnswerReader, *, generates: bool, is_clients_key: bool) -> RequestEnd:
    """The outcome of a request whose whole answer the client has received.

    Args:
        answer: what was relayed.
        generates: whether the route is one that every engine serves.
        is_clients_key: whether the engine saw the client's key, not the router's.
    """
    status = answer.status
    if status < 400 and answer.error is not None and (generates or answer.is_stream):
        # On other routes the error may be the requested object: a response that failed.
        status = answer.error
    if status < 400:
        return RequestEnd.OK
    of_the_engine = status == _TOO_MANY or (status >= 500 and status != _NOT_IMPLEMENTED)
    wrong_key = status in _OF_THE_KEY and not is_clients_key
    if of_the_engine or wrong_key or (generates and answer.has_no_route):
        return RequestEnd.ENGINE_ERROR
    return RequestEnd.CLIENT_ERROR


log = logging.getLogger(__name__)

T = TypeVar("T")

_HARMLESS = (EngineTimedOut, IdleConnectionLost)
"""Failures that do not show the engine's state."""
_NOT_BROKEN = (*_HARMLESS, AnswerAborted)
"""Failures that the request itself cannot have caused."""


@dataclass(frozen=True, slots=True)
class EngineTries:
    """Chooses engines to try; at most ``most`` of one role for one request, None for all.

    ``decodes_alone``: decode computes a prompt rather than wait for a resting prefill engine.
    """

    engines: EngineRegistry
    health: Health
    metrics: RouterMetrics
    most: int | None = None
    decodes_alone: bool = True

    def bounded(self, tries: Iterable[T]) -> Iterator[T]:
        """At most the allowed number of tries."""
        return islice(tries, self.most)

    def candidates(
        self, role: Role, decision: Decision, request: RoutedRequest
    ) -> Iterator[Candidate]:
        """The ranked engines that are still live, then those that came up since or rest.

        Only engines that serve the request's model and have not failed it.  A request that
        continues a response may have to try all of them: one engine keeps the response, and an
        engine that does not know it has not failed.
        """
        for candidate in self._all(role, decision, request):
            # Decode may be asked anew, so those that it has been sent to before count as well.
            asked = request.engines_asked(StepKind(role.value))
            may_ask_others = self.most is None or len(asked) < self.most or request.body.goes_on
            if may_ask_others or candidate.engine in asked:
                yield candidate

    def _all(self, role: Role, decision: Decision, request: RoutedRequest) -> Iterator[Candidate]:
        ranking = decision.ranking
        ordered = ranking.prefill if role is Role.PREFILL else ranking.decode
        ranked = tuple(one.candidate for one in ordered)
        found: set[str] = set()
        while request.num_broken(role) < MOST_BROKEN:
            # Anew each time: a try may take seconds, in which engines go down and come up.
            live = self._live(role, request)
            candidate = next(
                (
                    one
                    for one in (*ranked, *map(Candidate, live))
                    if one.engine in live
                    and one.engine not in found
                    and not request.has_failed_at(one.engine, role)
                ),
                None,
            )
            if candidate is None:
                return
            found.add(candidate.engine)
            yield candidate

    def _live(self, role: Role, request: RoutedRequest) -> tuple[str, ...]:
        """Engines that may be asked now."""
        if role is Role.PREFILL and self.decodes_alone:  # decode is preferred to a resting engine
            return self.engines.awake(role, request.may_serve(role), time.monotonic())
        return self.engines.live(role, request.may_serve(role))

    def has_other(self, role: Role, engine: str, request: RoutedRequest) -> bool:
        """Whether a request may go on to another engine than this one, if it fails here."""
        asked = request.engines_asked(StepKind(role.value)) | {engine}
        if self.most is not None and len(asked) >= self.most:
            return False
        live = self._live(role, request)
        return any(one != engine and not request.has_failed_at(one, role) for one in live)

    def no_decode_left(self, *failures: EngineFailure) -> NoEngineLeft:
        """The error for a request that no decode engine answers; ``failures``: of this request."""
        return NoEngineLeft(Role.DECODE.value, self.engines.failures(Role.DECODE, failures))

    def check_may_compute(self, request: RoutedRequest) -> None:
        """Check that decode may compute a request's prompt, if it goes there without a ticket.

        Raises:
            HandoverRequired: it could have been handed over, and decode must not compute it.
        """
        if request.direct is not None and not self.decodes_alone:
            raise HandoverRequired(request.direct)

    def may_ask_again(self, request: RoutedRequest, candidate: Candidate) -> bool:
        """Whether a decode engine may get a request a second time: it is no third one to break."""
        if request.num_broken(Role.DECODE) < MOST_BROKEN:
            return True
        return request.has_broken(candidate.engine, Role.DECODE)

    def failed_request(
        self, role: Role, engine: str, request: RoutedRequest, error: ConnectFailed | ConnectionLost
    ) -> EngineFailure:
        """Note a failure (``engine_failed``) of a request that goes on to another engine."""
        is_broken = isinstance(error, ConnectionLost) and not isinstance(error, _NOT_BROKEN)
        request.note(Failed(engine, role, is_broken, isinstance(error, EngineTimedOut)))
        return self.engine_failed(role, engine, request.request_id, error)

    def refused_request(
        self,
        role: Role,
        engine: str,
        status: int,
        request: RoutedRequest,
        retry_after: str | None,
    ) -> EngineFailure | None:
        """Note a refusal (``engine_refused``) of a request that goes on to another engine."""
        failure = self.engine_refused(role, engine, status, request.request_id, retry_after)
        if failure is not None:
            request.note(Failed(engine, role, status == INTERNAL_ERROR))
        return failure

    def too_short(self, role: Role, engine: str, request: RoutedRequest) -> EngineFailure:
        """Note that an engine takes shorter prompts than others, which is not its fault."""
        self.metrics.retried(role, engine)
        request.note(Failed(engine, role, False))
        return EngineFailure(engine, "its max_model_len is too short")

    def engine_failed(
        self, role: Role, engine: str, request_id: str, error: ConnectFailed | ConnectionLost
    ) -> EngineFailure:
        """Note that an engine failed: it is down without a connection, else ``/health`` decides.

        Raises:
            OutOfResources: this process is at fault, and another engine would not help.
        """
        # 1. This process has no file descriptors left.
        if isinstance(error, OutOfResources):
            raise error
        self.metrics.retried(role, engine)
        # 2. There is no connection: the engine is down until its /health answers.
        if isinstance(error, ConnectFailed):
            self.health.report_down(engine, str(error), request_id)
        # 3. Its connection broke, no answer came in time, or it ended the request: /health shows
        # whether that is load, though an engine that stops, or is paused, is still healthy.
        else:
            self.health.suspect(engine, str(error), request_id)
            if not isinstance(error, _HARMLESS):
                self._rest(engine, str(error), request_id)
        return EngineFailure(engine, str(error))

    def engine_refused(
        self, role: Role, engine: str, status: int, request_id: str, retry_after: str | None
    ) -> EngineFailure | None:
        """Note an answer's status; returns a failure if another engine is to be asked.

        ``retry_after``: the answer's ``Retry-After``.
        """
        # 1. The answer goes to the client, also if it is an error of the client.
        if status not in ELSEWHERE:
            self.engines.rests.note_success(engine)
            return None
        # 2. Another engine may succeed, and this one gets fewer requests.
        self.metrics.retried(role, engine)
        why = f"answered {status}"
        if status >= INTERNAL_ERROR:
            self.health.suspect(engine, why, request_id)
        self._rest(engine, why, request_id, retry_after_s(retry_after))
        return EngineFailure(engine, why)

    def _rest(self, engine: str, why: str, request_id: str, named_s: float | None = None) -> None:
        if engine not in self.engines:
            return
        rest_s = self.engines.rests.note_failure(engine, time.monotonic(), named_s)
        if rest_s is not None:
            log.warning(
                "pdconn: engine fails requests, others are asked before it "
                "engine=%s why=%r request=%s rest_s=%g",
                engine,
                why,
                request_id,
                rest_s,
            )
