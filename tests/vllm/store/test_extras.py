"""What else than tokens a key depends on, and prompts that have no keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pdconn.store.format.names import Chain
from pdconn.vllm.store.extras import extras_of

DIGEST = "ab" * 32


def request(**changes: Any) -> Any:
    made = SimpleNamespace(
        prompt_token_ids=list(range(300)), prompt_embeds=None, pooling_params=None,
        resumable=False, cache_salt=None, lora_request=None, mm_features=[],
    )  # fmt: skip
    vars(made).update(changes)
    return made


def media(identifier: str, offset: int) -> Any:
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=20)
    )


def keys(made: Any) -> tuple[bytes, ...]:
    extras = extras_of(made, 64)
    assert extras is not None
    return Chain(64).extended(made.prompt_token_ids, None, extras).keys


def adapter(folder: Path, value: float) -> Any:
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file({"a": np.full(4096, value, dtype=np.float32)}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    return SimpleNamespace(lora_name="same", lora_path=str(folder))


def test_a_salt_changes_every_key() -> None:
    assert not set(keys(request())) & set(keys(request(cache_salt="a")))


def test_media_change_the_keys_from_where_they_stand() -> None:
    plain, seen = keys(request()), keys(request(mm_features=[media(DIGEST, 130)]))
    assert plain[:2] == seen[:2]
    assert not set(plain[2:]) & set(seen[2:])
    moved = keys(request(mm_features=[media(DIGEST, 131)]))
    assert seen[2] != moved[2]


def test_adapters_of_one_name_are_told_apart_by_their_files(tmp_path: Path) -> None:
    first = keys(request(lora_request=adapter(tmp_path / "a", 1.0)))
    other = keys(request(lora_request=adapter(tmp_path / "b", 2.0)))
    same = keys(request(lora_request=adapter(tmp_path / "c", 1.0)))
    assert first == same
    assert not set(first) & set(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"pooling_params": object()},
        {"resumable": True},
        {"mm_features": [media("image-1", 10)]},
        {"lora_request": SimpleNamespace(lora_name="x", lora_path="/nowhere")},
    ],
    ids=["embeddings", "no tokens", "pooling", "stream", "named media", "unseen adapter"],
)
def test_a_prompt_whose_kv_cannot_be_told_has_no_keys(changes: dict[str, Any]) -> None:
    assert extras_of(request(**changes), 64) is None
