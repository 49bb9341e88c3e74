"""What else than tokens a key depends on, and prompts that have no keys."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from pdconn.store.format.prompt_rows import Chain
from pdconn.vllm.store.row_keys import extras_of

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
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
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


def test_no_text_of_an_input_is_taken_for_another_input(tmp_path: Path) -> None:
    """As joined text, the second adapter was the first one and an image."""
    plain, named = adapter(tmp_path / "a", 1.0), adapter(tmp_path / "b", 1.0)
    (tmp_path / "b" / "adapter_config.json").write_text(
        "{}|media=" + DIGEST + "@10+20", encoding="utf-8"
    )
    seen = keys(request(lora_request=plain, mm_features=[media(DIGEST, 10)]))
    assert not set(seen) & set(keys(request(lora_request=named)))
    salts = ["a", "'a'", "a|adapter=b", "é", "e\u0301", "\ud800", " ", "0"]
    first = [keys(request(cache_salt=salt))[0] for salt in salts]
    assert len(set(first)) == len(salts)
    assert keys(request(cache_salt="")) == keys(request())


def test_an_adapter_whose_files_change_under_the_engine_has_no_keys_any_more(
    tmp_path: Path,
) -> None:
    """The weights in memory, and blocks of the engine's own cache, may be of the old files."""
    there = adapter(tmp_path / "a", 1.0)
    before = keys(request(lora_request=there))
    weights = tmp_path / "a" / "adapter_model.safetensors"
    old, stamp = weights.read_bytes(), weights.stat().st_mtime_ns
    weights.write_bytes(old[:-1] + b"x")
    os.utime(weights, ns=(stamp + 1, stamp + 1))
    assert extras_of(request(lora_request=there), 64) is None
    weights.write_bytes(old)
    os.utime(weights, ns=(stamp, stamp))
    assert extras_of(request(lora_request=there), 64) is None
    moved = tmp_path / "b"
    shutil.copytree(tmp_path / "a", moved)  # a new path is a new adapter, to the engine, too
    again = SimpleNamespace(lora_name="same", lora_path=str(moved))
    assert keys(request(lora_request=again)) == before


@pytest.mark.parametrize(
    "identifier",
    ["ab" * 32, "cd" * 64, "adapter:" + "ab" * 32],
    ids=["blake3", "sha512", "with an adapter"],
)
def test_digests_of_media_are_believed(identifier: str) -> None:
    assert extras_of(request(mm_features=[media(identifier, 10)]), 64) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"pooling_params": object()},
        {"resumable": True},
        {"mm_features": [media("image-1", 10)]},
        {"mm_features": [media(uuid4().hex, 10)]},
        {"mm_features": [media(f"chat-{DIGEST}-image-0", 10)]},
        {"lora_request": SimpleNamespace(lora_name="x", lora_path="/nowhere")},
    ],
    ids=[
        "embeddings",
        "no tokens",
        "pooling",
        "stream",
        "named media",
        "a UUID",
        "named by a request",
        "unseen adapter",
    ],
)
def test_a_prompt_whose_kv_cannot_be_told_has_no_keys(changes: dict[str, Any]) -> None:
    assert extras_of(request(**changes), 64) is None
