"""moto's server in a process of its own, and a relay before it that fails on demand."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pdconn.store.shelf.obj.bucket import BucketPlace

EXCLUSIVE_MOTO = "tests.store.shelves.obj.exclusive_moto"
ROOT = Path(__file__).parents[4]
PATIENCE_S = 60.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key-of-tests", "AWS_SECRET_ACCESS_KEY": "secret-of-tests"}
_buckets = itertools.count(1)


@dataclass
class S3Server:
    """A server: its URL, and a client to look into it."""

    endpoint: str
    client: Any

    def new_place(self, prefix: str = "kv/") -> BucketPlace:
        """An empty bucket."""
        name = f"rows-{next(_buckets)}"
        self.client.create_bucket(Bucket=name)
        return BucketPlace(name, prefix, self.endpoint, "us-east-1")

    def keys(self, place: BucketPlace) -> list[str]:
        """Keys of all objects of a bucket."""
        found = self.client.list_objects_v2(Bucket=place.bucket).get("Contents", [])
        return [one["Key"] for one in found]

    def data_keys(self, place: BucketPlace) -> list[str]:
        """Keys of objects that are no indexes."""
        return [key for key in self.keys(place) if key.startswith(f"{place.prefix}data/")]

    def index_keys(self, place: BucketPlace) -> list[str]:
        """Keys of indexes."""
        return [key for key in self.keys(place) if key.startswith(f"{place.prefix}rows/")]


def free_port() -> int:
    """A port of this machine that was free."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that lives as long as the context."""
    import boto3
    from botocore.config import Config

    port = free_port()
    command = [sys.executable, "-m", EXCLUSIVE_MOTO, "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            assert process.poll() is None, "moto's server ended"
            assert time.monotonic() < until, "moto's server does not answer"
            time.sleep(0.05)
        endpoint = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1",
            aws_access_key_id="a", aws_secret_access_key="b",
            config=Config(s3={"addressing_style": "path"}),
        )  # fmt: skip
        try:
            yield S3Server(endpoint, client)
        finally:
            client.close()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


class _QuietServer(ThreadingHTTPServer):
    """Requests that are late may come when the server behind is gone."""

    def handle_error(self, request: Any, client_address: Any) -> None: ...


@dataclass
class Relay:
    """A server before another: passes requests on, or answers and delays them as set.

    Attributes:
        answers: by method, a status to answer with instead; ``*`` for all methods.
        delay_s: before a request is answered.
        loses: methods whose requests are done, and whose answers are cut off, once each.
        seen: (method, path) of each request.
    """

    behind: str
    answers: dict[str, int] = field(default_factory=dict)
    delay_s: float = 0.0
    loses: list[str] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None

    @property
    def endpoint(self) -> str:
        """Its URL."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Relay:
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                relay.seen.append((self.command, self.path))
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                time.sleep(relay.delay_s)
                status = relay.answers.get(self.command, relay.answers.get("*"))
                headers, data = [], b""
                if status is None:
                    status, headers, data = relay.ask(self.command, self.path, self.headers, body)
                if self.command in relay.loses:
                    relay.loses.remove(self.command)
                    self.close_connection = True
                    return
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    for name, value in headers:
                        self.send_header(name, value)
                    if self.command != "HEAD":
                        self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _pass  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def ask(self, method: str, path: str, headers: Any, body: bytes) -> Any:
        """What the server behind answers."""
        connection = HTTPConnection(self.behind.removeprefix("http://"), timeout=PATIENCE_S)
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        dropped = {"connection", "transfer-encoding", "server", "date"}
        if method != "HEAD":
            dropped.add("content-length")
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in dropped]
        found = answer.status, kept, answer.read()
        connection.close()
        return found

    def __exit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def credentials() -> Iterator[None]:
    """Those of tests, and none of the machine's, in the environment."""
    ours = {**CREDENTIALS, "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
