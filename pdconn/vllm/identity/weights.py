"""Proofs of the weights that an engine computes with.

A model's name is no proof: branches move, and files at a path or a URL are replaced.  A proof is
the content itself, or a name that can refer to no other content::

    commit:<40 hex>   of a model hub, which vLLM has resolved before loading, or the user has given
    files:<digest>    of the loaded files, unchanged since before they were loaded
    dummy:<seed>      weights that vLLM draws itself
    named:<text>      a name by the operator (``weights_id``), where there is no other proof

Otherwise the weights are unproven, and their KV is not shared: ModelScope, object stores, a hub
that did not answer, loaders that read other files than the model's, or files that were written
while the engine started.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ResolvedRevision, constants
from vllm.transformers_utils.runai_utils import is_runai_obj_uri

from pdconn.protocol.compat import UNPROVEN
from pdconn.vllm.blocks.drafts import drafter
from pdconn.vllm.identity.model_files import files_of, weights_digest
from transport.errors import shown

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--.+/snapshots/([0-9a-f]{40})/?$")
"""A commit's folder in huggingface_hub's cache, which is the model's path if vLLM is offline."""

_READ_FROM_MODEL = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "gguf", "mistral",
     "bitsandbytes", "sharded_state", "runai_streamer", "runai_streamer_sharded"}
)  # fmt: skip
"""Load formats that read the model's own files.

``npcache`` reads a copy that it has made once, ``ipc_cache`` and ``modelexpress`` another process's
memory, ``tensorizer`` a URI, and a plugin may read anything.
"""

_STARTTIME = 19
"""Among the fields of ``/proc/self/stat`` after the name; field 22 in proc(5)."""

_SPEED = frozenset(
    {"enable_multithread_load", "num_threads", "enable_weights_track", "concurrency",
     "memory_limit", "distributed"}
)  # fmt: skip
"""Keys of ``model_loader_extra_config`` that do not change which weights are read."""


_DOUBT = 300
"""Characters of a reason that are shown."""


class _Unproven(Exception):
    """Why the weights are unproven."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The proofs of a model's weights.

    Attributes:
        proofs: each suffices alone; the most exact first.
        doubt: why there is none; empty with proofs.
    """

    proofs: tuple[str, ...]
    doubt: str = ""

    @classmethod
    def from_trait(cls, trait: str) -> Weights:
        """Parse the text of a trait."""
        if trait.startswith(UNPROVEN):
            return cls((), trait.removeprefix(UNPROVEN))
        return cls(tuple(trait.split()))

    @property
    def trait(self) -> str:
        """The text of the trait that :mod:`pdconn.protocol.compat` compares."""
        return " ".join(self.proofs) if self.proofs else UNPROVEN + shown(self.doubt, _DOUBT)


def started_at() -> float:
    """When this process started, in seconds since the epoch: weights are loaded later."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    began = int(fields[_STARTTIME]) / os.sysconf("SC_CLK_TCK")  # since the machine started
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + began


def is_commit(revision: str | None) -> bool:
    """Whether a revision is a commit, which is immutable, unlike branches and tags."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def engine_weights(config: Any, *, named: str | None, since: float) -> dict[str, Weights]:
    """Proofs of the weights of an engine's ``model``, and of its ``draft`` if that keeps KV.

    Args:
        config: vLLM's.
        named, since: for :func:`weights_of`.
    """
    found = {"model": weights_of(config.model_config, config.load_config, named=named, since=since)}
    if (draft := drafter(config)) is not None:
        load = config.speculative_config.draft_load_config or config.load_config
        found["draft"] = weights_of(draft, load, named=named, since=since)
    return found


def weights_of(model: Any, load: Any, *, named: str | None, since: float) -> Weights:
    """Proofs of the weights of ``model``.

    Args:
        model: vLLM's ``ModelConfig``.
        load: vLLM's ``LoadConfig`` for it.
        named: the operator's name for them, which is not verified.
        since: when the process started that loads them; files written later may differ from the
            loaded ones.
    """
    proofs = () if named is None else (f"named:{named}",)
    try:
        return Weights((*proofs, *_proofs(model, load, since)))
    except _Unproven as doubt:
        return Weights(proofs, "" if proofs else str(doubt))


def _proofs(model: Any, load: Any, since: float) -> tuple[str, ...]:
    how = load.load_format
    if how == "dummy":
        return (f"dummy:{model.seed}",)
    if how not in _READ_FROM_MODEL:
        raise _Unproven(f"load_format {how} reads other files than the model's")
    extra = load.model_loader_extra_config
    chosen = {key: extra[key] for key in extra.keys() - _SPEED}
    for key, value in model.hf_config.to_dict().items():
        if key.endswith("_model_id") and value is not None:  # Ultravox loads parts by such names
            raise _Unproven(f"a part of the model is loaded from another place: {key} {value}")
    name = model.model_weights or model.model
    found = _of_files(name, since) if Path(name).exists() else _of_hub(name, model, load)
    return tuple(_with(proof, chosen) for proof in found)


def _with(proof: str, chosen: Mapping[str, Any]) -> str:
    """``proof``, restricted to the files that the loader's configuration selects."""
    if not chosen:
        return proof
    kind, _, value = proof.partition(":")
    text = json.dumps([value, chosen], sort_keys=True, default=str)
    return f"{kind}:{hashlib.sha256(text.encode()).hexdigest()}"


def _of_files(name: str, since: float) -> Iterator[str]:
    """Proofs of local files: their commit, if in huggingface_hub's cache, and their digest."""
    if snapshot := _SNAPSHOT.search(Path(name).absolute().as_posix()):
        yield f"commit:{snapshot[1]}"
    try:
        digest, newest = weights_digest(name), _newest(Path(name).absolute())
    except (OSError, ValueError) as error:
        raise _Unproven(f"files of {name} cannot be read: {error}") from error
    if digest is not None and newest <= since:
        yield f"files:{digest}"
    elif not snapshot:
        why = "has no files of weights" if digest is None else "was written since the engine began"
        raise _Unproven(f"{name} {why}")


def _newest(path: Path) -> float:
    """When a file, folder or link of a model was last changed, in seconds."""
    # A whole folder can be replaced by another, and so can a link in its path.
    links = (one for one in path.parents if one.is_symlink())
    files = files_of(str(path))
    times = [one.stat().st_ctime for one in (path, *files)]
    return max(*times, *(one.lstat().st_ctime for one in (path, *files, *links)))


def _of_hub(name: str, model: Any, load: Any) -> Iterator[str]:
    """Proofs of weights of a hub: a commit, and its files if they are on this machine."""
    if is_runai_obj_uri(name):
        raise _Unproven(f"an object in a store may be replaced: {name}")
    commit = model.revision
    if isinstance(commit, ResolvedRevision) and name == model.model:
        commit = commit.resolved
    if not is_commit(commit):
        raise _Unproven(f"the commit of {name} at {model.revision or 'main'} is unknown")
    yield f"commit:{commit}"
    cache = Path(load.download_dir or constants.HF_HUB_CACHE)
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    try:
        digest = weights_digest(str(folder))
    except (OSError, ValueError):
        return  # the commit is enough
    if digest is not None:
        yield f"files:{digest}"
