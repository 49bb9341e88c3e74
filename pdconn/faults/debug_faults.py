"""``debug_faults``: faults on demand for a decode engine, seeded and replayable.

    {"seed": 7,
     "reads": {"delay": 0.1, "delay_s": 0.5, "corrupt": 0.01},
     "messages": {"drop": 0.05, "skip": 2}}

``reads`` injects faults into reads of KV (``transport.faulty``); ``messages`` into frames of the
side channel in both directions (``pdconn.faults.frame_faults``).  Probabilities are per read and
per frame, from 0 to 1, default 0; ``delay_s`` is in seconds, default 0.1.  Answers can be wrong
with ``corrupt`` reads, and with ``corrupt`` messages without a secret or TLS: a Welcome with one
flipped bit in an offset still decodes.  ``kill`` ends the process; all other faults cost only time
or requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from pdconn.faults.frame_faults import MessageFaults
from transport.errors import did_you_mean
from transport.fault_schedule import FaultError, check_count
from transport.faulty import ReadFaults

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults to inject, and the seed that determines every draw.

    Raises:
        FaultError: the seed is not a whole number from 0.
    """

    seed: int = 0
    reads: ReadFaults = field(default_factory=ReadFaults)
    messages: MessageFaults = field(default_factory=MessageFaults)

    def __post_init__(self) -> None:
        check_count("seed", self.seed)

    def __bool__(self) -> bool:
        """Whether any fault can happen."""
        return bool(self.reads) or bool(self.messages)

    def __str__(self) -> str:
        parts = (("reads", self.reads), ("messages", self.messages))
        return "; ".join([f"seed {self.seed}", *[f"{k}: {v}" for k, v in parts if v]])


def read_faults(value: object, path: str = "debug_faults") -> Faults:
    """Check faults parsed from JSON; ``path`` is their name in errors.

    Raises:
        FaultError: naming the key path, both values, and for an unknown key the nearest
            known one.

    Example:
        >>> read_faults({"reads": {"corupt": 1}})
        Traceback (most recent call last):
        transport.fault_schedule.FaultError: debug_faults.reads: expected a known key, got \
'corupt'; did you mean 'corrupt'?
    """
    parts = dict(_mapping(value, path))
    for key, record in (("reads", ReadFaults), ("messages", MessageFaults)):
        if key in parts:
            parts[key] = _build(record, parts[key], f"{path}.{key}")
    return _build(Faults, parts, path)


def _build(record: type[Record], value: object, path: str) -> Record:
    values = _mapping(value, path)
    known = [field.name for field in fields(record)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise FaultError(path, "a known key", key, did_you_mean(str(key), known))
    try:
        return record(**values)
    except FaultError as error:
        raise error.prefixed(f"{path}.") from None


def _mapping(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise FaultError(path, "a mapping", value)
    return value
