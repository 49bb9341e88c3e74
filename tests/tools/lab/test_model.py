"""The small models are the same everywhere and have every kind of layer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from pdconn.tools.lab.model import (
    CHARACTERS,
    FIRST_WORD,
    HANDOVER,
    TINY,
    ModelSpec,
    weights,
    write_model,
)

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

_SMALL = dataclasses.replace(TINY, name="small", layers=3, vocab=64)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cache"), _SMALL)


def _files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_two_machines_write_the_same_bytes(written: Path, tmp_path: Path) -> None:
    again = write_model(tmp_path, _SMALL)
    assert again.name == written.name
    assert _files(again) == _files(written)


def test_a_written_model_is_not_written_again(written: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in written.iterdir()}
    assert write_model(written.parent, _SMALL) == written
    assert {path: path.stat().st_mtime_ns for path in written.iterdir()} == before
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_another_spec_is_another_model(written: Path) -> None:
    other = dataclasses.replace(_SMALL, seed=_SMALL.seed + 1)
    assert other.digest != _SMALL.digest
    (_, ours), (_, theirs) = next(weights(_SMALL)), next(weights(other))
    assert not np.array_equal(ours, theirs)


def test_every_third_layer_attends_to_everything(written: Path) -> None:
    assert TINY.layer_types == ("sliding_attention", "sliding_attention", "full_attention") * 2
    config = json.loads((written / "config.json").read_text(encoding="utf-8"))
    assert config["layer_types"] == list(_SMALL.layer_types)
    assert config["sliding_window"] == 64
    assert config["architectures"] == ["Gemma3ForCausalLM"]


def test_weights_have_the_scales_that_make_answers_vary() -> None:
    by_name = dict(weights(TINY))
    assert all(weight.dtype == np.float32 for weight in by_name.values())
    embedding, head = by_name["model.embed_tokens.weight"], by_name["lm_head.weight"]
    assert np.std(embedding) * TINY.hidden**0.5 == pytest.approx(2.0, rel=0.02)
    assert np.std(head[FIRST_WORD:]) * TINY.hidden**0.5 == pytest.approx(4.0, rel=0.02)


def test_no_greedy_answer_is_a_special_token() -> None:
    head = dict(weights(TINY))["lm_head.weight"]
    assert not head[:FIRST_WORD].any()


def test_a_word_is_a_token_and_reads_like_its_id(written: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(written / "tokenizer.json"))
    assert tokenizer.encode("w4 w63 hello").ids == [4, 63, 3]
    assert tokenizer.decode([5, 6]) == "w5 w6"


def test_other_texts_are_spelled_and_no_two_are_the_same_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(write_model(tmp_path) / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY.vocab
    first, last = tokenizer.encode("w4 w1900").ids, tokenizer.token_to_id(CHARACTERS[-1])
    assert (first, last) == ([4, 1900], TINY.vocab - 1)
    hello, shallow = (tokenizer.encode(text) for text in ("hello, w12", "shallow, w12"))
    assert hello.tokens == [*"hello,", "w12"]
    assert shallow.tokens == [*"shallow,", "w12"]
    assert tokenizer.token_to_id("<unk>") not in {*hello.ids, *shallow.ids}


def test_chats_have_a_template(written: Path) -> None:
    settings = json.loads((written / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert "message['content']" in settings["chat_template"]


@pytest.mark.parametrize("spec", [TINY, HANDOVER])
def test_the_models_take_long_prompts(spec: ModelSpec) -> None:
    assert spec.max_positions >= 4096


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="4 heads cannot share 3 KV heads"):
        dataclasses.replace(TINY, kv_heads=3)
    with pytest.raises(ValueError, match="vocabulary of 4"):
        dataclasses.replace(TINY, vocab=4)
