"""A proxy that knows nothing of pdconn: prefill, then decode, parameters passed on.

    python examples/plain_proxy.py http://localhost:8100 http://localhost:8200 "Once upon a time"

It shows all that a proxy has to do: ask prefill for one token, and hand the
``kv_transfer_params`` of its answer to decode, untouched.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send JSON, get JSON."""
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return dict(json.load(response))


def answer(prefill: str, decode: str, body: dict[str, Any]) -> dict[str, Any]:
    """Compute the prompt on ``prefill`` and the answer on ``decode``."""
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    lent = post(prefill, {**body, "max_tokens": 1, "kv_transfer_params": asked})
    return post(decode, {**body, "kv_transfer_params": lent["kv_transfer_params"]})


if __name__ == "__main__":
    prefill, decode, prompt = sys.argv[1:4]
    print(answer(prefill, decode, {"prompt": prompt, "max_tokens": 16})["choices"][0]["text"])
