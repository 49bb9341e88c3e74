"""The engines of :mod:`tests.contracts.engines` behind HTTP, as routers find them."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.exceptions import VLLMValidationError

from tests.contracts.engines import CHAT, COMPLETIONS, Engine

TEXT = "said by decode"


class EngineServer(http.server.ThreadingHTTPServer):
    """One engine at a port of its own; a request with ``do_remote_decode`` is prefill's."""

    daemon_threads = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = engine
        self.lock = threading.Lock()
        self.headers: list[dict[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: EngineServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        models = [{"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 2048}]
        self._say(200, {"object": "list", "data": models, "status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path not in (COMPLETIONS, CHAT):
            self._say(404, {"detail": "Not Found"})
            return
        with self.server.lock:
            self.server.headers.append(dict(self.headers))
            try:
                self._say(200, self._answer(body))
            except (ValueError, VLLMValidationError) as error:  # as in vLLM: a bad request
                self._say(400, {"error": {"message": str(error)}})

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        engine, params = self.server.engine, body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            answer = engine.prefill(self.path, body, self.headers.get("X-Request-Id", ""))
        else:
            request = engine.request(self.path, body)
            engine.pull(request)
            answer = engine.answer(self.path, request, None, body)
        words = {"text": TEXT} if self.path == COMPLETIONS else _message(TEXT)
        answer["choices"] = [{"index": 0, "finish_reason": "length", **words}]
        return answer

    def _say(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        pass


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


@contextmanager
def serving(engine: Engine) -> Iterator[EngineServer]:
    """Serve an engine until the block ends."""
    server = EngineServer(engine)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
