"""One end of a read between two processes, each with the card that its settings choose.

    python -m tests.multinode.card_end lend|read nixl|ucx SIDE_CHANNEL_HOST|- [EXTRA]

``-`` opens the transport as it is, without a choice.  ``EXTRA`` is a JSON object of keys.  The
lender prints ``@{"address", "base", …}`` and waits for the end of its standard input; the reader
takes that line from its own, reads, and prints ``@{"error", "arrived", …}``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from pdconn.vllm.config import read_settings
from pdconn.vllm.memory.card import kv_card
from transport import Transport
from transport.nixl.transport import NixlTransport
from transport.types import Memory, Spans
from transport.ucx.transport import UcxTransport

NBYTES = 32 << 20
_BYTE, _RUNS, _PATIENCE_S = 7, 32, 30.0


def opened(kind: str, host: str, extra: dict[str, Any]) -> tuple[Transport, dict[str, Any]]:
    """The transport, and what was chosen for it."""
    devices: tuple[str, ...] = ()
    said = "nothing was chosen"
    if host != "-":
        card = kv_card(read_settings(extra, host, 5600, 0))
        devices, said = card.devices, card.sentence
    transport: Transport
    if kind == "nixl":
        transport = NixlTransport("end", huge_pages=False, net_devices=devices)
    else:
        options = {"NET_DEVICES": ",".join(devices)} if devices else {}
        transport = UcxTransport("end", huge_pages=False, options=options)
    left = os.environ.get("UCX_NET_DEVICES")
    return transport, {"devices": devices, "sentence": said, "environment": left}


def main() -> None:
    """One lend or one read."""
    side, kind, host, *extra = sys.argv[1:]
    transport, chosen = opened(kind, host, json.loads(extra[0]) if extra else {})
    memory = np.full(NBYTES, _BYTE if side == "lend" else 0, np.uint8)
    base = memory.ctypes.data
    transport.register([Memory(base, memory.size)])
    if side == "lend":
        say(address=transport.address().hex(), base=base, **chosen)
        sys.stdin.read()
        return
    theirs = json.loads(sys.stdin.readline())
    peer = transport.connect(bytes.fromhex(theirs["address"]))
    at = np.arange(_RUNS, dtype=np.uint64) * np.uint64(NBYTES // _RUNS)
    nbytes = np.full(_RUNS, NBYTES // _RUNS, np.uint64)
    read = transport.read(peer, Spans(local=at + base, remote=at + theirs["base"], nbytes=nbytes))
    deadline = time.monotonic() + _PATIENCE_S
    while (settled := transport.poll(read)) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    error = "it did not end" if settled is None else str(settled.error or "")
    say(error=error, arrived=bool((memory == _BYTE).all()), **chosen)


def say(**facts: Any) -> None:
    """A line for the test."""
    print("@" + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # UCX's own ending may take seconds
