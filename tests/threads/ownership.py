"""Which mutable things the threads behind an object can reach, and which of them two can.

A side is the engine's thread, or one :class:`~pdconn.threads.Worker`: all that can be reached from
its first object by attributes, elements, closures and bound methods.  Boxes and workers are where
a side ends.  Values are no part of it: frozen records, numbers, texts, functions, arrays (of KV).
"""

from __future__ import annotations

import enum
import functools
import logging
import random
import selectors
import socket
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from pdconn.store.rank.copies import HostArea
from pdconn.store.shelf.transfer import RecentRows
from pdconn.threads import AmountBox, Box, RightOfWay, Worker

PACKAGES = ("pdconn.", "transport.", "registration.")
_ENDS = (Box, Worker, AmountBox, RightOfWay, HostArea, RecentRows)
"""Staging is memory as KV is: which of its bytes are whose travels in the boxes.  Which files a
process used last is the process's, as its page cache is, and has a lock."""
_LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Thread,
)
_CONTAINERS = (list, dict, set, deque, bytearray)
_OTHERS = (socket.socket, selectors.BaseSelector, random.Random, *_LOCKS)


@dataclass
class Side:
    """What one thread reaches: each thing by its id, with a path to it."""

    name: str
    reached: dict[int, tuple[Any, str]] = field(default_factory=dict)
    workers: list[Worker[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, root: Any) -> Side:
        """All that is reached from ``root``."""
        side, seen = cls(name), {id(root)}
        waiting = [(root, name)]
        while waiting:
            thing, path = waiting.pop()
            if is_mutable(thing):
                side.reached[id(thing)] = thing, path
            for step, child in _children(thing):
                if id(child) in seen:
                    continue
                seen.add(id(child))
                if isinstance(child, Worker):
                    side.workers.append(child)
                elif not isinstance(child, _ENDS):
                    waiting.append((child, f"{path}{step}"))
        return side


def sides_of(front: Any) -> list[Side]:
    """The side of the thread that has ``front``, and of every worker behind it."""
    sides = [Side.of(type(front).__name__, front)]
    for side in sides:  # grows: a worker's thread may have workers of its own
        known = {each.name for each in sides}
        for worker in side.workers:
            if worker.name not in known:
                sides.append(Side.of(worker.name, worker._work))
    return sides


def shared(sides: list[Side]) -> list[str]:
    """Paths of what two sides reach."""
    found = []
    for number, one in enumerate(sides):
        for other in sides[number + 1 :]:
            for key in one.reached.keys() & other.reached.keys():
                found.append(f"{one.reached[key][1]} is {other.reached[key][1]}")
    return sorted(found)


def locks(sides: list[Side]) -> list[str]:
    """Paths of locks and threads that belong to no box and no worker."""
    return sorted(
        path for side in sides for thing, path in side.reached.values() if isinstance(thing, _LOCKS)
    )


def is_mutable(thing: Any) -> bool:
    """Whether two threads that have it would share something that changes."""
    return isinstance(thing, (*_CONTAINERS, *_OTHERS)) or _is_ours(thing)


def _is_ours(thing: Any) -> bool:
    kind = type(thing)
    if not f"{kind.__module__}.".startswith(PACKAGES) or isinstance(thing, enum.Enum | type):
        return False
    if is_dataclass(thing):
        return not kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    return not getattr(kind, "__struct_config__", None)  # messages are msgspec's, and frozen


def _children(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Mapping):
        for key, value in list(thing.items()):
            yield "[key]", key
            yield "[…]", value
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        for element in list(thing):
            yield "[…]", element
    elif isinstance(thing, functools.partial):
        bound = (thing.func, *thing.args, *thing.keywords.values())  # it changes no more
        yield from (("<partial>", each) for each in bound)
    elif isinstance(thing, types.MethodType):
        yield from ((".__self__", thing.__self__), (".__func__", thing.__func__))
    elif isinstance(thing, types.BuiltinMethodType) and not isinstance(
        thing.__self__, types.ModuleType | type(None)
    ):
        yield ".__self__", thing.__self__
    elif isinstance(thing, types.FunctionType):
        for cell in thing.__closure__ or ():
            yield "<closure>", cell.cell_contents
    elif _is_ours(thing) and not isinstance(thing, logging.Logger):
        names = {*getattr(thing, "__dict__", {})}
        names |= {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
        for name in sorted(names):
            if hasattr(thing, name):
                yield f".{name}", getattr(thing, name)
