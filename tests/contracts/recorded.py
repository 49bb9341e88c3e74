"""What routers send, as ``routers/*.json`` records it from their sources.

A record says what a router makes of a client's body for prefill, and of prefill's answer for
decode::

    prefill.kv_transfer_params       what prefill gets there; null: nothing
    prefill.set, .set_if_present     fields that the router writes
    prefill.at_most_if_present       numbers that it lowers
    prefill.remove                   fields that it leaves out
    decode.takes                     path in decode's body -> path in the answer ("" is all of it)
    decode.sets                      path in decode's body -> value, after that
    decode.numbers                   "kept", or "doubles": read as IEEE doubles and written again

``$prefill_host`` stands for the host by which the router knows prefill.  Nothing here knows a
router by its name.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "routers"
ROUTERS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(FOLDER.glob("*.json"))
}
_GO_WRITES_AS_INTEGER = 1e21
"""Below that Go's encoding/json writes a whole double without a point or an exponent."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way in which a router hands requests over.

    Attributes:
        outcome: "handed over", "computed by decode" or "refused" (of the ticket, by decode).
    """

    router: str
    name: str
    outcome: str
    why: str
    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]
    refused: tuple[Mapping[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.router}: {self.name}"

    def prefill_body(self, client: Mapping[str, Any]) -> dict[str, Any]:
        """What prefill gets for a client's body."""
        body = copy.deepcopy(dict(client))
        for name in self.prefill["remove"]:
            body.pop(name, None)
        body |= self.prefill["set"]
        body |= {
            name: value for name, value in self.prefill["set_if_present"].items() if name in client
        }
        for name, most in self.prefill["at_most_if_present"].items():
            if name in client:
                body[name] = min(client[name], most)
        if self.prefill["kv_transfer_params"] is not None:
            body["kv_transfer_params"] = copy.deepcopy(self.prefill["kv_transfer_params"])
        return carried(body, self.decode["numbers"])

    def decode_body(
        self, client: Mapping[str, Any], answer: Mapping[str, Any], prefill_host: str
    ) -> dict[str, Any]:
        """What decode gets for a client's body, once prefill has answered."""
        body = copy.deepcopy(dict(client))
        read = carried(dict(answer), self.decode["numbers"])
        for path, source in self.decode["takes"].items():
            taken = _at(read, source)
            if taken is not None:
                put(body, path, taken)
        for path, value in self.decode["sets"].items():
            if path.partition(".")[0] in body or "." not in path:
                put(body, path, prefill_host if value == "$prefill_host" else value)
        return carried(body, self.decode["numbers"])


def _modes() -> list[Mode]:
    return [
        Mode(
            name,
            mode["name"],
            mode["outcome"],
            mode.get("why", ""),
            mode["prefill"],
            mode["decode"],
            tuple(mode.get("refused", ())),
        )
        for name, router in ROUTERS.items()
        for mode in router["modes"]
    ]


def carried(body: dict[str, Any], numbers: str) -> dict[str, Any]:
    """A body as it is after JSON, or after a program that knows doubles only."""
    if numbers == "kept":
        return json.loads(json.dumps(body))  # type: ignore[no-any-return]
    doubles = json.loads(json.dumps(body), parse_int=float)
    return json.loads(json.dumps(_written_by_go(doubles)))  # type: ignore[no-any-return]


def struct_of(value: Any) -> Any:
    """A value after a protobuf ``Struct``: every number is a double, in Python too.

    >>> struct_of({"remote_port": 5600, "do_remote_prefill": True})
    {'remote_port': 5600.0, 'do_remote_prefill': True}
    """
    if isinstance(value, dict):
        return {name: struct_of(one) for name, one in value.items()}
    if isinstance(value, list):
        return [struct_of(one) for one in value]
    return float(value) if type(value) is int else value


def request_id(router: Mapping[str, Any], prefill: str, decode: str) -> str:
    """The ``X-Request-Id`` that a router makes for a request between two engines."""
    text: str = router["request_id"]
    made = uuid.uuid5(uuid.NAMESPACE_URL, router["router"] + prefill + decode)
    names = {"$uuid": str(made), "$hex": made.hex, "$prefill": prefill, "$decode": decode}
    for name, value in names.items():
        text = text.replace(name, value)
    return text


def put(body: dict[str, Any], path: str, value: Any) -> None:
    """Set a field by its dotted path."""
    *folders, last = path.split(".")
    for folder in folders:
        body = body[folder]
    body[last] = value


def without(body: Mapping[str, Any], path: str) -> dict[str, Any]:
    """A copy that lacks the field at a dotted path."""
    changed: dict[str, Any] = copy.deepcopy(dict(body))
    *folders, last = path.split(".")
    inner = changed
    for folder in folders:
        inner = inner[folder]
    del inner[last]
    return changed


def _at(answer: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        answer = answer.get(name)
    return copy.deepcopy(answer)


def _written_by_go(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _written_by_go(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [_written_by_go(one) for one in value]
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and abs(value) < _GO_WRITES_AS_INTEGER else value


MODES = _modes()
