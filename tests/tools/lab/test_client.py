"""The client reads vLLM's answers and carries tickets untouched.  The servers are fakes."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdconn.router.openai.bodies import lend_params
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.lab_errors import RequestRefused

_METRICS = """# HELP vllm:kv_cache_usage_perc usage
vllm:cache_config_info{block_size="32",num_gpu_blocks="101"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="lab"} 0.25
vllm:request_success_total{finished_reason="stop"} 2.0
vllm:request_success_total{finished_reason="length"} 3.0
"""


def _choice(*tokens: int, reason: str | None = "length") -> dict[str, Any]:
    return {
        "index": 0,
        "text": "".join(f"w{token}" for token in tokens),
        "token_ids": list(tokens),
        "finish_reason": reason,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": [-token / 10 for token in tokens],
            "top_logprobs": [{f"token_id:{token}": -token / 10} for token in tokens],
        },
    }


class FakeServer(http.server.ThreadingHTTPServer):
    """Answers with ``reply`` and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, reply: bytes, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.status = reply, status
        self.asked: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._reply()

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.asked.append(json.loads(self.rfile.read(length)))
        self._reply()

    def _reply(self) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.reply)))
        self.end_headers()
        self.wfile.write(self.server.reply)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Say nothing."""


@contextmanager
def _serving(reply: object, status: int = 200) -> Iterator[FakeServer]:
    content = reply if isinstance(reply, str) else json.dumps(reply)
    with FakeServer(content.encode(), status) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_completion_is_tokens_with_logprobs() -> None:
    with _serving({"choices": [_choice(7, 8)]}) as server:
        answer = Client(server.url).complete([4, 5], 2, seed=1)
    assert answer.tokens == (7, 8)
    assert answer.logprobs == (-0.7, -0.8)
    assert answer.top == ({7: -0.7}, {8: -0.8})
    assert answer.finish_reason == "length"
    (asked,) = server.asked
    assert (asked["prompt"], asked["max_tokens"], asked["seed"]) == ([4, 5], 2, 1)
    assert asked["temperature"] == 0
    assert "kv_transfer_params" not in asked


def test_a_streamed_completion_is_timed() -> None:
    chunks = [
        {"choices": [_choice(7, reason=None)]},
        {"choices": [_choice(8)]},
        {"choices": []},
    ]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    with _serving(stream) as server:
        timed = Client(server.url).stream([4], 2)
    assert server.asked[0]["stream"] is True
    assert timed.answer.tokens == (7, 8)
    assert timed.answer.finish_reason == "length"
    assert 0 < timed.first_token_s <= timed.last_token_s


def test_an_error_in_a_stream_is_an_error() -> None:
    stream = 'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n'
    with _serving(stream) as server, pytest.raises(RequestRefused, match="gone"):
        Client(server.url).stream([4], 2)


def test_a_refusal_has_status_and_reason() -> None:
    with (
        _serving({"message": "too long"}, status=400) as server,
        pytest.raises(RequestRefused, match="too long") as refused,
    ):
        Client(server.url).complete([4])
    assert refused.value.status == 400


def test_the_ticket_passes_from_prefill_to_decode_untouched() -> None:
    ticket = {"remote_engine_id": "p", "remote_block_ids": [[0, 3], [1]], "do_remote_prefill": True}
    first = {"choices": [_choice(7)], "kv_transfer_params": ticket}
    with _serving(first) as prefill, _serving({"choices": [_choice(7, 8)]}) as decode:
        answer = prefill_then_decode(Client(prefill.url), Client(decode.url), [4, 5], 2)
    assert answer.tokens == (7, 8)
    assert prefill.asked[0]["kv_transfer_params"] == lend_params()
    assert prefill.asked[0]["max_tokens"] == 1
    assert decode.asked[0]["kv_transfer_params"] == ticket


def test_metrics_are_summed_over_labels() -> None:
    with _serving(_METRICS) as server:
        assert Client(server.url).metrics()["vllm:request_success_total"] == 5


def test_free_blocks_leave_out_the_null_block() -> None:
    with _serving(_METRICS) as server:
        assert Client(server.url).free_blocks() == 75


def test_a_server_that_does_not_count_blocks_is_distinguished() -> None:
    with _serving("up 1\n") as server, pytest.raises(ValueError, match="no label num_gpu_blocks"):
        Client(server.url).free_blocks()
