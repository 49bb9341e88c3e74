"""A digest of the files of a model or an adapter.

It covers names, sizes, the headers of safetensors, and samples of each tensor, since a fine-tuned
model has the header of its base::

    safetensors    header | 1 KiB ........ 1 KiB ........ 1 KiB | 1 KiB ...
                            start   a step of 16 MiB        end   next tensor
    other files    64 samples, evenly

At most 16,384 samples are read, which takes about a second.  Models that differ only in a few rows
of one tensor may have the same digest (docs/stores.md).  It also covers small files that change the
meaning of weights: an index, scales and methods of quantisation, and how media are prepared.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
import zlib
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.tensors")
_FOLDERS = ("", "*/", "*/*/")
"""Some models have an encoder in a folder of its own; links are followed."""
_NOT_LOADED = re.compile(r"(?:^|/)(?:\.|original/)")
"""vLLM ignores ``original``; names with a leading dot belong to downloaders."""
_BESIDE = ("*.index.json", "*quant*.json", "*processor_config.json")
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")
_SAMPLE = 1024
_SAMPLES = 64
_STEP = 16 << 20
_MAX_HEADER = 1 << 27
_MOST = 1 << 14


def weights_digest(model: str) -> str | None:
    """The digest of the weights in ``model``, a directory or one file; None if there are none.

    An index alone is no weights.

    Raises:
        OSError: a file cannot be read.
    """
    found = files_of(model)
    if not found:
        return None
    root = Path(model) if Path(model).is_dir() else Path(model).parent
    samples = [(path, s) for path in found for s in _samples(path, path.relative_to(root))]
    # By a checksum of their places, so that the choice does not depend on the order of tensors.
    places = (s.place for _, s in samples if s.place is not None)
    highest = max(heapq.nsmallest(_MOST, places), default=0)
    digest = hashlib.sha256()
    for path, of_one in groupby(samples, itemgetter(0)):
        digest.update(f"{path.relative_to(root).as_posix()}|{path.stat().st_size}|".encode())
        with path.open("rb", buffering=0) as file:
            for _, s in of_one:
                if s.place is None or s.place <= highest:
                    file.seek(s.start)
                    digest.update(file.read(s.nbytes))
    return digest.hexdigest()


def files_of(model: str) -> list[Path]:
    """The files that :func:`weights_digest` covers, in order; empty without weights.

    For one file they are its parts, and for GGUF the media encoders in its directory.
    """
    root = Path(model)
    if root.is_file():
        stem = _SPLIT.sub("", root.stem)
        parts = {path for path in root.parent.iterdir() if _SPLIT.sub("", path.stem) == stem}
        media = set(root.parent.glob("mmproj*.gguf")) if root.suffix == ".gguf" else set()
        return sorted({root} | {one for one in parts | media if one.suffix == root.suffix})
    weights = {
        path
        for folder in _FOLDERS
        for form in _WEIGHTS
        for path in root.glob(folder + form)
        if not _NOT_LOADED.search(path.relative_to(root).as_posix())
    }
    return sorted(weights.union(*(root.glob(form) for form in _BESIDE))) if weights else []


class _Sample(NamedTuple):
    """Bytes of a file; those of a tensor have the checksum of their place."""

    start: int
    nbytes: int
    place: int | None = None


def _samples(path: Path, relative: Path) -> Iterator[_Sample]:
    """The samples of a file: its header and some of each tensor, or evenly spaced ones."""
    size = path.stat().st_size
    if path.suffix == ".json" or size <= _SAMPLE * _SAMPLES:
        yield _Sample(0, size)
        return
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            header_nbytes = int.from_bytes(file.read(8), "little")
            is_one = header_nbytes <= min(_MAX_HEADER, size - 8)
            header = file.read(header_nbytes) if is_one else b"{}"
        if is_one:
            yield _Sample(0, 8 + header_nbytes)
            for name, tensor in json.loads(header).items():
                if name != "__metadata__":
                    first, end = (8 + header_nbytes + int(at) for at in tensor["data_offsets"])
                    for start in (*range(first, end, _STEP), max(first, end - _SAMPLE)):
                        place = zlib.crc32(f"{relative}|{start}".encode())
                        yield _Sample(start, min(_SAMPLE, end - start), place)
            return
    for number in range(_SAMPLES):
        yield _Sample((size - _SAMPLE) * number // (_SAMPLES - 1), _SAMPLE)
