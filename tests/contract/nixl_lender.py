"""A process that lends memory over NIXL, driven by lines of JSON on its standard input.

    {"do": "open", "name": …, "boot": …, "options": …}  ->  {"address": hex, "base": int}
    {"do": "close"}                                     ->  {}

``open`` closes what was open before.  One process serves many tests, as
importing nixl takes longer than all that a test does.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transport.nixl import NixlTransport, load_library
from transport.testing import Arena


def main() -> None:
    """Serve until standard input ends."""
    load_library()
    lender: NixlTransport | None = None
    arena = Arena.patterned()
    _answer(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if lender is not None:
            lender.close()
            lender = None
        if order["do"] == "open":
            lender = NixlTransport(order["name"], boot=order["boot"], **order["options"])
            lender.register([arena.memory])
            _answer(address=lender.address().hex(), base=arena.memory.base)
        else:
            _answer()


def _answer(**answer: Any) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
