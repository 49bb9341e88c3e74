"""An OpenAI-compatible server on a thread: streams tokens that follow from the prompt.

Set its attributes to make it misbehave; what it was asked is in ``asked``.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MODEL = "fake"


def tokens_of(prompt: Sequence[int], count: int) -> list[int]:
    """What an honest server says to a prompt."""
    return [4 + (sum(prompt) + position) % 2000 for position in range(count)]


class FakeServer(http.server.ThreadingHTTPServer):
    """One service."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[dict[str, Any]] = []
        self.tells_ids = True
        self.models: list[str] = [MODEL]
        self.refuses_from: int | None = None  # the request counted from 0
        self.breaks_from: int | None = None  # as that: cut in the middle of the answer
        self.ends_early = False  # the same, but the connection is ended in good form
        self.wrong_from: int | None = None  # as that: another second token
        self.route: dict[str, Any] | None = None  # what /debug/route says


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": model} for model in self.server.models]})
        elif self.path.startswith("/debug/route/bench-") and self.server.route is not None:
            self._json(200, self.server.route)
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = len(self.server.asked)
        self.server.asked.append(body)
        if _reached(self.server.refuses_from, number):
            self._json(500, {"error": {"message": "no more"}})
            return
        tokens = tokens_of(body["prompt"], body["max_tokens"])
        if _reached(self.server.wrong_from, number):
            tokens[1] += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if _reached(self.server.breaks_from, number):
            self._stream(tokens[: len(tokens) // 2], ends=False)
            if self.server.ends_early:
                self._chunk(b"")
            self.close_connection = True
            return
        self._stream(tokens, ends=True)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _stream(self, tokens: Sequence[int], *, ends: bool) -> None:
        for position, token in enumerate(tokens):
            last = ends and position == len(tokens) - 1
            choice: dict[str, Any] = {
                "text": f" w{token}",
                "finish_reason": "length" if last else None,
            }
            if self.server.tells_ids:
                choice["token_ids"] = [token]
            self._chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def _json(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Log nothing."""


def _reached(limit: int | None, number: int) -> bool:
    return limit is not None and number >= limit


@contextmanager
def serving() -> Iterator[FakeServer]:
    """A server, gone at the end."""
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
