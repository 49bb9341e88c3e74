"""Points in the life of a followed request, and how an engine kills itself at one of them.

A point is a call of a function of the connector: before it, or after it.  A mortal engine, whose
connector is in :mod:`tests.vllm.engines.streams.mortal`, looks at each such call whether its file
names the point.  If so it renames the file, and kills its processes with SIGKILL::

    test     arm_engine ──► file "opened sent" ──► is_killed: the file is gone, and so is the engine
    engine        Connection.send_frames ── sends Opened ── renames the file ── SIGKILL

So the engine dies exactly there, and a point that is not reached leaves the file as it was.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pdconn.lifecycle.pull import SendConfirm
from pdconn.protocol.messages import (
    ChecksumRequest,
    Completed,
    Confirm,
    Confirmed,
    Follow,
    Grown,
    Opened,
    Parked,
    decode_from_lender,
    decode_from_reader,
)

DIES_AT = "PDCONN_DIES_AT"
"""The environment variable that names an engine's file."""

Meant = Callable[[Sequence[Any], Any], bool]
"""Whether a call is the point, by its positional arguments with ``self``, and what it returned."""


@dataclass(frozen=True)
class KillPoint:
    """A point of ``side``.

    Attributes:
        where: the function, as ``module:Class.method``.
        is_meant: whether a call of it is the point.
        is_before: whether the engine dies before the call; else after it.
        count: which of these calls it is.
        parks: whether decode is asked well before prefill, whose request comes later.
    """

    side: str
    name: str
    where: str
    is_meant: Meant = lambda args, returned: True
    is_before: bool = False
    count: int = 1
    parks: bool = False

    def __str__(self) -> str:
        return f"{self.side}: {self.name}"


def _is_of_stream(args: Sequence[Any], returned: Any) -> bool:
    """A call about a request that is lent by a stream."""
    params = args[1].kv_transfer_params
    return isinstance(params, dict) and "stream" in (params.get("pdconn") or {})


def _is_first(message: Any) -> bool:
    """A message that announces the first blocks."""
    return any(blocks.ids and blocks.first == 0 for blocks in message.blocks)


def _is_later(message: Any) -> bool:
    """A message that announces others."""
    return any(blocks.ids and blocks.first > 0 for blocks in message.blocks)


def _sends(
    side: str,
    name: str,
    kind: type,
    is_meant: Callable[[Any], bool] = lambda message: True,
    *,
    parks: bool = False,
) -> KillPoint:
    """Right after a message was sent."""
    parse = decode_from_lender if side == "prefill" else decode_from_reader

    def has_sent(args: Sequence[Any], returned: Any) -> bool:
        sent = (message for body in args[1] for message in parse(body))
        return any(isinstance(message, kind) and is_meant(message) for message in sent)

    where = "pdconn.sidechannel.connection:Connection.send_frames"
    return KillPoint(side, f"{name} sent", where, has_sent, parks=parks)


def _comes(kind: type, is_meant: Callable[[Any], bool] = lambda message: True) -> Meant:
    """A call whose first argument is a message of this kind."""
    return lambda args, returned: isinstance(args[1], kind) and is_meant(args[1])


_SESSIONS = "pdconn.lender.sessions:LenderSessions."
_STREAMS = "pdconn.lender.streams:StreamTable."
_LENDING = "pdconn.vllm.lends.lending:Lending."
_PULLING = "pdconn.vllm.pulls.pulling:Pulling."
_PULLS = "pdconn.puller.pulls:Pulls."
_HEARS = "pdconn.puller.request_pull:RequestPull.heard_of_stream"

OF_PREFILL = (
    KillPoint("prefill", "follow received", f"{_SESSIONS}_follow", is_before=True, parks=True),
    KillPoint("prefill", "reader parked", f"{_STREAMS}park_reader", parks=True),
    _sends("prefill", "parked", Parked, parks=True),
    KillPoint("prefill", "request arrived", f"{_LENDING}on_new_request", _is_of_stream),
    KillPoint("prefill", "stream opened", f"{_SESSIONS}_open_stream"),
    _sends("prefill", "opened", Opened),
    _sends("prefill", "first blocks", Grown, _is_first),
    _sends("prefill", "later blocks", Grown, _is_later),
    KillPoint(
        "prefill", "prompt computed", f"{_LENDING}request_finished", _is_of_stream, is_before=True
    ),
    KillPoint("prefill", "ticket written", f"{_STREAMS}complete", is_before=True),
    _sends("prefill", "completed", Completed),
    KillPoint("prefill", "checksums asked", f"{_SESSIONS}_ask_checksum", is_before=True),
    KillPoint("prefill", "confirm received", f"{_SESSIONS}_confirm", is_before=True),
    _sends("prefill", "confirmed", Confirmed),
)
"""Of the engine that lends, in their order."""

OF_DECODE = (
    KillPoint("decode", "request arrived", f"{_PULLING}on_new_request"),
    _sends("decode", "follow", Follow),
    KillPoint("decode", "parked received", _HEARS, _comes(Parked), is_before=True, parks=True),
    KillPoint("decode", "opened received", _HEARS, _comes(Opened), is_before=True),
    KillPoint("decode", "first blocks received", _HEARS, _comes(Grown, _is_first), is_before=True),
    KillPoint(
        "decode",
        "blocks asked for",
        f"{_PULLING}note_claims",
        lambda args, returned: any(outcome.problem is None for outcome in args[1]),
        is_before=True,
    ),
    KillPoint(
        "decode",
        "blocks allocated",
        f"{_PULLING}update_state_after_alloc",
        lambda args, returned: args[3] > 0,
    ),
    KillPoint(
        "decode",
        "first read posted",
        "pdconn.puller.reads:TransportJobs.post_chunk",
        lambda args, returned: bool(returned),
    ),
    KillPoint("decode", "first read settled", f"{_PULLS}_settled", is_before=True),
    KillPoint(
        "decode",
        "later read posted",
        "pdconn.puller.reads:TransportJobs.post_chunk",
        lambda args, returned: bool(returned),
        count=2,
    ),
    KillPoint("decode", "completed received", _HEARS, _comes(Completed), is_before=True),
    KillPoint("decode", "all read", f"{_PULLS}_verify", is_before=True),
    _sends("decode", "checksum request", ChecksumRequest),
    KillPoint(
        "decode",
        "all compared",
        "pdconn.puller.request_pull:RequestPull.message",
        _comes(SendConfirm),
        is_before=True,
    ),
    _sends("decode", "confirm", Confirm),
    KillPoint(
        "decode",
        "confirmed received",
        "pdconn.puller.request_pull:RequestPull.record",
        is_before=True,
    ),
    KillPoint("decode", "pull reported", f"{_PULLING}end_pull", is_before=True),
)
"""Of the engine that follows, in their order."""

POINTS = (*OF_PREFILL, *OF_DECODE)


def file_of(work: Path, engine: str) -> Path:
    """Where an engine's point is named."""
    return work / f"{engine}.dies-at"


def arm_engine(path: Path, point: KillPoint) -> None:
    """Have the engine die at ``point``."""
    reached = _reached(path)
    reached.unlink(missing_ok=True)
    new = path.with_suffix(".new")
    new.write_text(str(point), encoding="utf-8")
    new.rename(path)


def is_killed(path: Path) -> bool:
    """Whether the engine has reached its point."""
    return _reached(path).exists()


def disarm_engine(path: Path) -> None:
    """Let it live."""
    path.unlink(missing_ok=True)


def _reached(path: Path) -> Path:
    return path.with_suffix(".reached")


@functools.cache
def make_mortal() -> None:
    """Watch every point in this process."""
    path = Path(os.environ[DIES_AT])
    by_function: dict[str, list[KillPoint]] = {}
    for point in POINTS:
        by_function.setdefault(point.where, []).append(point)
    for where, points in by_function.items():
        owner, name = where.rsplit(".", 1)
        _watch(resolve_name(owner), name, points, path)


def _watch(owner: type, name: str, points: Sequence[KillPoint], path: Path) -> None:
    """Replace a method by one that dies at these points."""
    calling, counted = getattr(owner, name), dict.fromkeys(map(str, points), 0)

    def look(args: Sequence[Any], returned: Any, *, is_before: bool) -> None:
        try:
            armed = path.read_text(encoding="utf-8")
        except FileNotFoundError:  # nearly always
            return
        for point in points:
            if str(point) != armed or point.is_before is not is_before:
                continue
            counted[armed] += point.is_meant(args, returned)
            if counted[armed] == point.count:
                path.rename(_reached(path))
                os.killpg(os.getpgrp(), signal.SIGKILL)  # the server and its engine core

    @functools.wraps(calling)
    def call(*args: Any, **kwargs: Any) -> Any:
        look(args, None, is_before=True)
        returned = calling(*args, **kwargs)
        look(args, returned, is_before=False)
        return returned

    setattr(owner, name, call)
