"""31 hostile requests to each engine: each costs itself, and both engines go on.

Clients and proxies write ``kv_transfer_params``, and any client names its request.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import pdconn
from pdconn.router.openai.bodies import lend_params
from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.lab_client import Client, prefill_only
from tests.vllm.engines.engines import Expected, PdPair, Prompt, one_after_another

PROMPT: Prompt = tuple(range(300, 420))
HUGE = "9" * 5000
"""An integer that Python reads and writes only if told to."""

Params = dict[str, Any]


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


def altered(**changes: Any) -> Callable[[Params], Any]:
    """The ticket with other values; those of ``ours`` are in the part that is pdconn's."""
    ours = changes.pop("ours", {})
    return lambda ticket: {**ticket, **changes, "pdconn": {**ticket["pdconn"], **ours}}


PARAMS: dict[str, Callable[[Params], Any]] = {
    "a text": lambda ticket: "a ticket",
    "a number": lambda ticket: 7,
    "a list": lambda ticket: [ticket],
    "no ticket": lambda ticket: {"do_remote_prefill": True},
    "both ways": altered(do_remote_decode=True, remote_port=1),
    "wishes that are lists": lambda ticket: {"do_remote_prefill": [[]], "do_remote_decode": [{}]},
    "ours a list": lambda ticket: {**ticket, "pdconn": [1]},
    "ours nothing": lambda ticket: {**ticket, "pdconn": None},
    "a version of 30 digits": altered(ours={"version": 10**30}),
    "a port of 400 digits": altered(remote_port=10**400),
    "a negative port": altered(remote_port=-1),
    "half a port": altered(remote_port=0.5),
    "tokens beyond measure": altered(remote_num_tokens=1e308),
    "fewer tokens than the prompt": altered(remote_num_tokens=1),
    "a long host": altered(remote_host="h" * 600),
    "a host that is none": altered(remote_host="a..b"),
    "a host of another family": altered(remote_host="::"),
    "an invisible host": altered(remote_host="\u200b"),
    "a number for a name": altered(remote_engine_id=7),
    "an empty name": altered(remote_request_id=""),
    "a long name": altered(remote_request_id="\u200b" * 600),
    "a long boot": altered(ours={"incarnation": "b" * 100_000}),
    "another boot": altered(ours={"incarnation": "0123456789abcdef"}),
    "nested blocks": altered(remote_block_ids=nested(100)),
    "very many blocks": altered(remote_block_ids=[list(range(200_000))] * 3),
    "very many groups": altered(remote_block_ids=[[1]] * 5000),
    "blocks that are objects": altered(remote_block_ids=[{"1": 1}, "12", None]),
    "blocks that are truths": altered(remote_block_ids=[[True]] * 3),
}


def body(prompt: Prompt, params: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": 1,
        "kv_transfer_params": params,
        **more,
    }


def hostile(model: str, ticket: Params) -> dict[str, tuple[str, dict[str, str]]]:
    """Bodies and headers, by what is wrong with them."""
    whole = {name: (body(PROMPT, change(ticket)), "r") for name, change in PARAMS.items()}
    # What vLLM hands on unread, and names that decode would refuse in a ticket.
    whole["no object, past vLLM's checks"] = (
        body(PROMPT, None, vllm_xargs={"kv_transfer_params": "a ticket"}),
        "r",
    )
    whole["a request of a long name"] = body(PROMPT, lend_params()), "r" * 600
    requests = {
        name: (json.dumps({**content, "model": model}), {"X-Request-Id": request_id})
        for name, (content, request_id) in whole.items()
    }
    text, headers = requests["a negative port"]
    assert '"remote_port": -1' in text
    requests["an integer of 5000 digits"] = (
        text.replace('"remote_port": -1', f'"remote_port": {HUGE}'),
        headers,
    )
    return requests


def status(url: str, text: str, headers: dict[str, str]) -> int:
    """What an engine answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 80, timeout=120)
    try:
        connection.request(
            "POST", "/v1/completions", text, {"Content-Type": "application/json", **headers}
        )
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def our_frames(lines: list[str]) -> list[str]:
    """Lines of tracebacks that name a file of ours, wherever the checkout lies."""
    ours = Path(pdconn.__file__).parent
    return [line for line in lines if f'File "{ours}/' in line]


@pytest.mark.only(layout="BHLNC", prefix_caching=True)
def test_31_hostile_requests_leave_both_engines_alive(pair: PdPair, expected: Expected) -> None:
    """vLLM's front end keeps some of them from its engine, which then answers 400 or 500; for
    what other front ends let through see ``tests/vllm/test_connector.py``."""
    requests = hostile(pair.decode.model, dict(prefill_only(pair.prefill, PROMPT) or {}))
    assert len(requests) == 31
    assert len({text + str(headers) for text, headers in requests.values()}) == 31
    logged = len(pair.decode_engine.log.read_text(encoding="utf-8"))
    for engine in (pair.prefill_engine, pair.decode_engine):
        answers = {name: status(engine.url, *request) for name, request in requests.items()}
        assert set(answers.values()) <= {200, 400, 422, 500}, answers
        assert Client(engine.url).complete(PROMPT, 1, kv_transfer_params=None).tokens
    assert answers["a long host"] == 500, "the policy of this pair is to fail"
    good = one_after_another()[50]
    ticket = prefill_only(pair.prefill, good)
    assert compare(expected[good], pair.decode.complete(good, 6, kv_transfer_params=ticket)) is None
    lines = pair.decode_engine.log.read_text(encoding="utf-8")[logged:].splitlines()
    wrong = [line for line in lines if "ticket refused: " in line]
    assert len(wrong) >= 15
    assert max(map(len, wrong)) < 500
    assert our_frames(lines) == [], "no traceback"
    assert our_frames([f'  File "{pdconn.__file__}", line 1, in f']) != [], "the control"
