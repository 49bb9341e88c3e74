"""A process that lends memory over UCX, driven by lines of JSON, as ``nixl_lender`` is.

{"do": "open", "name": …, "boot": …, "options": …}  ->  {"address": hex, "base": int}
{"do": "close"}                                     ->  {}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transport.testing import Arena
from transport.ucx import UcxTransport
from transport.ucx_library import load_library


def main() -> None:
    """Serve until standard input ends."""
    load_library()
    lender: UcxTransport | None = None
    arena = Arena.patterned()
    _answer(ready=True)
    for line in sys.stdin:
        order = json.loads(line)
        if lender is not None:
            lender.close()
            lender = None
        if order["do"] == "open":
            lender = UcxTransport(order["name"], boot=order["boot"], **order["options"])
            lender.register([arena.memory])
            _answer(address=lender.address().hex(), base=arena.memory.base)
        else:
            _answer()


def _answer(**answer: Any) -> None:
    print("@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
