"""A model hub on this machine: one repository, whose branch can be moved to another commit.

It answers what huggingface_hub asks to resolve a branch, to list files and to fetch them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPO = "org/tiny"
_API, _FILES = f"/api/models/{REPO}", f"/{REPO}/resolve/"


class Hub:
    """Attributes: ``commits``, each a folder; and ``head``, where the branch points."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.commits: dict[str, Path] = {}
        self.head = ""

    def push(self, commit: str, folder: Path) -> None:
        """Let the branch point to a commit with the files of ``folder``."""
        self.commits[commit], self.head = folder, commit

    def answer(self, path: str) -> tuple[dict[str, str], bytes] | None:
        """Headers and body; None for what is not there."""
        path = path.partition("?")[0]
        if path.startswith(_FILES):
            return self._file(path.removeprefix(_FILES))
        if path.startswith(f"{_API}/"):
            return self._api(path.removeprefix(f"{_API}/"))
        return self._info(self.head) if path == _API else None

    def _api(self, path: str) -> tuple[dict[str, str], bytes] | None:
        what, _, rest = path.partition("/")
        commit = self._commit(rest.partition("/")[0])
        if commit is None or what not in ("revision", "tree"):
            return None
        return self._info(commit) if what == "revision" else self._tree(commit)

    def _commit(self, revision: str) -> str | None:
        commit = self.head if revision == "main" else revision
        return commit if commit in self.commits else None

    def _info(self, commit: str) -> tuple[dict[str, str], bytes]:
        names = [{"rfilename": path.name} for path in self.commits[commit].iterdir()]
        found = {"id": REPO, "modelId": REPO, "sha": commit, "siblings": names}
        return {}, json.dumps(found).encode()

    def _tree(self, commit: str) -> tuple[dict[str, str], bytes]:
        files = [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
            for path in self.commits[commit].iterdir()
        ]
        return {}, json.dumps(files).encode()

    def _file(self, path: str) -> tuple[dict[str, str], bytes] | None:
        revision, _, name = path.partition("/")
        commit = self._commit(revision)
        if commit is None or not (self.commits[commit] / name).is_file():
            return None
        content = (self.commits[commit] / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        return {"ETag": f'"{digest}"', "X-Repo-Commit": commit}, content


@contextmanager
def hub() -> Iterator[Hub]:
    """A hub that listens on loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = serving.answer(self.path)
            headers, body = found or ({"X-Error-Code": "EntryNotFound"}, b"{}")
            self.send_response(404 if found is None else 200)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *words: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield serving
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
