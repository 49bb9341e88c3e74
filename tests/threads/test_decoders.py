"""Decoders of msgspec are made when a module is imported, by one thread.

msgspec looks a type up at its first use, and two threads that do so at once crash the process: the
two readers of a rank's store did, at the first load of an engine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIRST_USES = """
import enum, msgspec, sys, threading
sys.setswitchinterval(1e-6)
for number in range(200):
    class Kind(enum.StrEnum):
        FA = "fa"
        WA = "wa"
    class Meta(msgspec.Struct, frozen=True):
        index: int
        kind: Kind
    data = msgspec.msgpack.encode(Meta(1, Kind.FA))
    decoder = msgspec.msgpack.Decoder(Meta) if sys.argv[1] == "made before" else None
    go = threading.Barrier(3)
    def decode():
        go.wait()
        decoder.decode(data) if decoder else msgspec.msgpack.decode(data, type=Meta)
    threads = [threading.Thread(target=decode) for _ in range(2)]
    for thread in threads:
        thread.start()
    go.wait()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize(
    ("how", "crashes"),
    [("made before", False), ("at the first use", True)],
    ids=["ours", "control"],
)
def test_two_threads_may_decode_a_type_for_the_first_time(how: str, crashes: bool) -> None:
    """The control crashed in each of 8 runs; here it has three."""
    codes = []
    for _ in range(3 if crashes else 1):
        run = subprocess.run(
            [sys.executable, "-c", FIRST_USES, how], capture_output=True, check=False
        )
        codes.append(run.returncode)
    assert any(codes) == crashes, codes


LAZY = re.compile(r"msgspec\.(?:msgpack|json)\.decode\([^#\n]*type=|msgspec\.convert\(")


def lazy_decodes(text: str) -> list[str]:
    """Lines that have msgspec look a type up where they run."""
    return [line.strip() for line in text.splitlines() if LAZY.search(line)]


def test_no_room_of_the_connector_decodes_a_type_it_has_no_decoder_of() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for folder in ("pdconn", "transport", "registration")
        for path in (ROOT / folder).rglob("*.py")
        if not {"tools", "router"} & set(path.parts)
        and (lines := lazy_decodes(path.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_lazy_decode_is_found() -> None:
    """Negative control."""
    assert lazy_decodes("x = msgspec.json.decode(data, type=Row)")
    assert not lazy_decodes("x = msgspec.json.decode(data)")
