"""What proves which weights an engine computes with.

A name is no proof: a branch moves, and files behind a path or a URL are written anew.  A proof is
the content itself, or a name that can stand for no other content::

    commit:<40 hex>   of a model hub, which vLLM resolved before it loaded, or the user gave
    files:<digest>    of the files that were loaded, unchanged since before they were
    dummy:<seed>      weights that vLLM draws itself
    named:<text>      the operator's word (``weights_id``), for weights that nothing else proves

Whatever else is a doubt, and who shares nothing on a doubt is never wrong: ModelScope, object
stores, a hub that could not be asked, loaders that take weights from elsewhere than the model's
files, or files that were written while the engine started.
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
from pdconn.vllm.identity.files import files_of, weights_digest
from transport.errors import shown

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--.+/snapshots/([0-9a-f]{40})/?$")
"""Where huggingface_hub keeps a commit's files; offline vLLM takes that folder for the model."""

_READ_FROM_MODEL = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "gguf", "mistral",
     "bitsandbytes", "sharded_state", "runai_streamer", "runai_streamer_sharded"}
)  # fmt: skip
"""Ways to load that read the model's own files.

``npcache`` reads a copy that it made once, ``ipc_cache`` and ``modelexpress`` another process's
memory, ``tensorizer`` a URI, and a plugin what it likes.
"""

_STARTTIME = 19
"""Among the fields of ``/proc/self/stat`` after the name; field 22 in proc(5)."""

_SPEED = frozenset(
    {"enable_multithread_load", "num_threads", "enable_weights_track", "concurrency",
     "memory_limit", "distributed"}
)  # fmt: skip
"""Keys of ``model_loader_extra_config`` that change how fast weights are read, and not which."""


_DOUBT = 300
"""Characters of a doubt that are shown."""


class _Unproven(Exception):
    """Why nothing proves which weights these are."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What proves which weights a model has.

    Attributes:
        proofs: each alone is proof enough, the most exact first.
        doubt: why there is none; empty with proofs.
    """

    proofs: tuple[str, ...]
    doubt: str = ""

    @classmethod
    def of(cls, trait: str) -> Weights:
        """From the text of a trait."""
        if trait.startswith(UNPROVEN):
            return cls((), trait.removeprefix(UNPROVEN))
        return cls(tuple(trait.split()))

    @property
    def trait(self) -> str:
        """As a text that :mod:`pdconn.protocol.compat` compares."""
        return " ".join(self.proofs) if self.proofs else UNPROVEN + shown(self.doubt, _DOUBT)


def started_at() -> float:
    """When this process began, in seconds since the epoch: weights are loaded after it."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    began = int(fields[_STARTTIME]) / os.sysconf("SC_CLK_TCK")  # since the machine started
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + began


def is_commit(revision: str | None) -> bool:
    """Whether a revision names a commit, which stays what it is, as branches and tags do not."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def engine_weights(config: Any, *, named: str | None, since: float) -> dict[str, Weights]:
    """What proves the weights of an engine's ``model``, and of its ``draft`` if that keeps KV.

    ``config`` is vLLM's; see :func:`weights_of` for the rest.
    """
    found = {"model": weights_of(config.model_config, config.load_config, named=named, since=since)}
    if (draft := drafter(config)) is not None:
        load = config.speculative_config.draft_load_config or config.load_config
        found["draft"] = weights_of(draft, load, named=named, since=since)
    return found


def weights_of(model: Any, load: Any, *, named: str | None, since: float) -> Weights:
    """What proves the weights of ``model``.

    Args:
        model: vLLM's ``ModelConfig``.
        load: vLLM's ``LoadConfig`` for it.
        named: the operator's name for them, which is believed.
        since: when the process began that loads them: files written later may be others.
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
        raise _Unproven(f"load_format {how} takes weights from elsewhere than the model's files")
    extra = load.model_loader_extra_config
    chosen = {key: extra[key] for key in extra.keys() - _SPEED}
    for key, value in model.hf_config.to_dict().items():
        if key.endswith("_model_id") and value is not None:  # Ultravox loads parts by such names
            raise _Unproven(f"a part of the model comes from elsewhere: {key} {value}")
    name = model.model_weights or model.model
    found = _of_files(name, since) if Path(name).exists() else _of_hub(name, model, load)
    return tuple(_with(proof, chosen) for proof in found)


def _with(proof: str, chosen: Mapping[str, Any]) -> str:
    """``proof``, of some of its files alone where the loader was told which."""
    if not chosen:
        return proof
    kind, _, value = proof.partition(":")
    text = json.dumps([value, chosen], sort_keys=True, default=str)
    return f"{kind}:{hashlib.sha256(text.encode()).hexdigest()}"


def _of_files(name: str, since: float) -> Iterator[str]:
    """What proves files on this machine: their commit, where huggingface_hub keeps it, and they."""
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
    """When anything of a model was last written, renamed, or linked to, in seconds.

    A whole folder can be put in another's place, and a link on the way to it be made anew.
    """
    links = (one for one in path.parents if one.is_symlink())
    files = files_of(str(path))
    times = [one.stat().st_ctime for one in (path, *files)]
    return max(*times, *(one.lstat().st_ctime for one in (path, *files, *links)))


def _of_hub(name: str, model: Any, load: Any) -> Iterator[str]:
    """What proves weights of a hub: a commit, and its files, where they are on this machine."""
    if is_runai_obj_uri(name):
        raise _Unproven(f"what an object store has under a name may be replaced: {name}")
    commit = model.revision
    if isinstance(commit, ResolvedRevision) and name == model.model:
        commit = commit.resolved
    if not is_commit(commit):
        raise _Unproven(f"no hub said which commit {name} at {model.revision or 'main'} is")
    yield f"commit:{commit}"
    cache = Path(load.download_dir or constants.HF_HUB_CACHE)
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    try:
        digest = weights_digest(str(folder))
    except (OSError, ValueError):
        return  # the commit is enough
    if digest is not None:
        yield f"files:{digest}"
