"""The digest of a model's files: what it is of, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdconn.vllm.identity import model_files
from pdconn.vllm.identity.model_files import weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"a" * 100)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "model-2.safetensors",
        "whisper/model.safetensors",
        "model.safetensors.index.json",
        "hf_quant_config.json",
        "quantize_config.json",
        "preprocessor_config.json",
        "processor_config.json",
    ],
)
def test_a_file_that_changes_what_the_weights_are_changes_the_digest(
    folder: Path, name: str
) -> None:
    before = weights_digest(str(folder))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"x")
    changed = weights_digest(str(folder))
    (folder / name).write_bytes(b"y")
    assert len({before, changed, weights_digest(str(folder))}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "tokenizer.json",
        "generation_config.json",
        "original/consolidated.pth",
        ".cache/huggingface/download/model.safetensors",
    ],
)
def test_what_vllm_does_not_load_changes_nothing(folder: Path, name: str) -> None:
    before = weights_digest(str(folder))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"x")
    assert weights_digest(str(folder)) == before


def test_a_folder_of_links_is_read_through_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert weights_digest(str(tmp_path / "linked")) == weights_digest(str(folder))
    (tmp_path / "whole").symlink_to(folder)
    assert weights_digest(str(tmp_path / "whole")) == weights_digest(str(folder))


def test_a_file_of_several_parts_is_all_of_them(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2))
    for path in (first, second, tmp_path / "other.gguf", tmp_path / "mmproj-f16.gguf"):
        path.write_bytes(b"a")
    seen = [weights_digest(str(first))]
    for path in (tmp_path / "other.gguf", second, tmp_path / "mmproj-f16.gguf"):
        path.write_bytes(b"b")
        seen.append(weights_digest(str(first)))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def test_of_very_many_tensors_some_samples_are_read_and_every_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another training run is seen, and another shape; of single tensors not every one."""
    from safetensors.numpy import save_file

    def write(value: int, changed: int = -1, **more: Any) -> str | None:
        tensors = {f"layer.{n}": np.full(4096, value + (n == changed), np.uint8) for n in range(60)}
        save_file(tensors | more, tmp_path / "model.safetensors")
        return weights_digest(str(tmp_path))

    def seen() -> int:
        return sum(write(1, changed) != write(1) for changed in range(0, 60, 3))

    assert seen() == 20
    whole = write(1)
    monkeypatch.setattr(model_files, "_MOST", 20)
    assert len({whole, write(1), write(2), write(1, extra=np.zeros(9, np.uint8))}) == 4
    assert 0 < seen() < 20
