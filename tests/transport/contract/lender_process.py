"""A process that lends memory over NIXL or UCX, driven by lines of JSON on its standard input.

    python -m tests.transport.contract.lender_process nixl|ucx

    {"do": "open", "name": …, "boot": …, "options": …}  ->  {"address": hex, "base": int}
    {"do": "close"}                                     ->  {}

``open`` closes what was open before.  One process serves many tests, as
importing either takes longer than a test.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from transport import Transport
from transport.nixl import transport as nixl
from transport.testing.contract import Arena
from transport.ucx import library as ucx_library
from transport.ucx import transport as ucx

BACKENDS: dict[str, tuple[Callable[[], object], Callable[..., Transport]]] = {
    "nixl": (nixl.load_library, nixl.NixlTransport),
    "ucx": (ucx_library.load_library, ucx.UcxTransport),
}


def main() -> None:
    """Serve until standard input ends."""
    load_library, make = BACKENDS[sys.argv[1]]
    load_library()
    lender: Transport | None = None
    arena = Arena.patterned()
    _answer(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        if lender is not None:
            lender.close()
            lender = None
        if command["do"] == "open":
            lender = make(command["name"], boot=command["boot"], **command["options"])
            lender.register([arena.memory])
            _answer(address=lender.address().hex(), base=arena.memory.base)
        else:
            _answer()


def _answer(**answer: Any) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
