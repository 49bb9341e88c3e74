"""Decoders of msgspec are made when a module is imported, by one thread.

msgspec looks a type up at its first use, and two threads that do so at once crash the process: the
two readers of a rank's store did, at the first load of an engine.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST_USES = """
import contextlib, enum, msgspec, sys, threading
both_look = threading.Barrier(2)

class Meeting(enum.EnumType):
    # msgspec asks an enumeration for what it has found out about it, and this has both threads find
    # nothing.
    def __getattr__(cls, name):
        if name == "__msgspec_cache__" and sys.argv[1] != "made before":
            with contextlib.suppress(threading.BrokenBarrierError):
                both_look.wait(20)
        raise AttributeError(name)

class Kind(enum.StrEnum, metaclass=Meeting):
    FA = "fa"
    WA = "wa"

class Meta(msgspec.Struct, frozen=True):
    index: int
    kind: Kind

data = msgspec.msgpack.encode(Meta(1, Kind.FA))
decoder = msgspec.msgpack.Decoder(Meta) if sys.argv[1] == "made before" else None

def decode():
    decoder.decode(data) if decoder else msgspec.msgpack.decode(data, type=Meta)

threads = [threading.Thread(target=decode) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def crashes(how: str) -> bool:
    run = subprocess.run([sys.executable, "-c", FIRST_USES, how], capture_output=True, check=False)
    return run.returncode != 0


def test_two_threads_may_decode_a_type_whose_decoder_was_made_before() -> None:
    assert not crashes("made before")


def test_two_threads_that_decode_a_type_for_the_first_time_crash() -> None:
    """Negative control."""
    assert crashes("at the first use")


ELSEWHERE = {"router", "tools"}
"""The router decodes on one thread, and the tools are no engine."""


def lazy_decodes(text: str) -> list[int]:
    """Lines of calls that have msgspec look a type up where they run."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if _is_lazy(call)]


def _is_lazy(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name in ("msgspec.json.decode", "msgspec.msgpack.decode"):
        return any(keyword.arg == "type" for keyword in call.keywords)
    return name == "msgspec.convert"


def test_no_room_of_the_connector_decodes_a_type_it_has_no_decoder_of() -> None:
    rooms = [
        path
        for folder in ("pdconn", "transport", "registration")
        for path in (ROOT / folder).rglob("*.py")
        if not ELSEWHERE & set(path.relative_to(ROOT).parts)
    ]
    assert ROOT / "pdconn/store/format/row.py" in rooms
    found = {path: lazy_decodes(path.read_text(encoding="utf-8")) for path in rooms}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_lazy_decode_is_found() -> None:
    """Negative control."""
    assert lazy_decodes("x = msgspec.json.decode(\n    data,\n    type=Row,\n)") == [1]
    assert lazy_decodes("x = msgspec.convert(data, Row)") == [1]
    assert not lazy_decodes("x = msgspec.json.decode(data)")
