"""A cache of huggingface_hub on disk, laid out as it lays it out, and vLLM's configuration over it.

Blobs are named by their content, a snapshot has a link to each of its files, and a branch is a file
with a commit in it::

    models--org--name/blobs/<sha256>   snapshots/<commit>/<file> -> blob   refs/main: <commit>
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

REPO = "org/tiny"
OLD, NEW = "0a" * 20, "1b" * 20


def add_commit(
    cache: Path, commit: str, model: Path, changed: Mapping[str, bytes] | None = None
) -> Path:
    """A snapshot of ``model`` with some files ``changed``, to which the branch points now."""
    repo = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        content = (changed or {}).get(path.name, path.read_bytes())
        blob = repo / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / path.name).symlink_to(blob)
    (repo / "refs" / "main").write_text(commit, encoding="utf-8")
    return snapshot


def tuned(model: Path) -> dict[str, bytes]:
    """Weights of another training run: the same header, other tensors."""
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-4096:] = bytes(len(content[-4096:]))
    return {"model.safetensors": bytes(content)}
