"""Namespaces: engines share rows only if they compute the same KV from the same tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import MultiModalConfig

    from pdconn.vllm.store.row_keys import _Plain

from pdconn.tools.lab.model import write_model
from pdconn.vllm.identity.model_files import weights_digest
from pdconn.vllm.store.row_keys import namespace_of, salted
from tests.vllm.store.configured import TRAITS, config, layout, named, proven


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models"))


def test_engines_of_one_model_share_a_namespace_wherever_it_lies(
    model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert named(config(model), TRAITS, layout()) == named(
        config(copy), TRAITS | {"model": "elsewhere"}, layout()
    )


CHANGES: dict[str, Callable[[Path], str]] = {
    "dtype": lambda m: named(config(m, dtype="bfloat16"), TRAITS, layout()),
    "quantisation": lambda m: named(config(m, quantization="fp8"), TRAITS, layout()),
    "an override": lambda m: named(config(m, hf={"rope_theta": 1e6}), TRAITS, layout()),
    "KV dtype": lambda m: named(config(m), TRAITS | {"kv_dtype": "fp8"}, layout()),
    "block content": lambda m: named(config(m), TRAITS | {"block_content": "X"}, layout()),
    "layout of rows": lambda m: named(config(m), TRAITS, layout(128)),
    "a reset": lambda m: salted(named(config(m), TRAITS, layout()), "salt"),
    "quantisation's arguments": lambda m: named(
        config(m, quantization_config={"ignore": ["lm_head"]}), TRAITS, layout()
    ),
    "how media are processed": lambda m: named(
        config(m, multimodal_config=MultiModalConfig(mm_processor_kwargs={"num_crops": 4})),
        TRAITS,
        layout(),
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_kv_changes_the_namespace(
    model: Path, change: Callable[[Path], str]
) -> None:
    assert change(model) != named(config(model), TRAITS, layout())


def test_tables_that_depend_on_the_longest_prompt_do_and_others_do_not(model: Path) -> None:
    def of(length: int, **hf: Any) -> str:
        return named(config(model, max_model_len=length, hf=hf), TRAITS, layout())

    scaled = {"rope_scaling": {"rope_type": "longrope"}}
    assert of(2048) == of(4096)
    assert of(2048, suppress_tokens=None) == of(4096, suppress_tokens=None)  # has "su" in it
    assert of(2048, **scaled) != of(4096, **scaled)


def test_a_fine_tuned_model_has_another_digest_although_its_header_is_the_same(
    tmp_path: Path,
) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    tensors = {f"layer.{n}": rng.normal(size=(256, 256)).astype(np.float32) for n in range(4)}
    for name in ("base", "same", "tuned"):
        (tmp_path / name).mkdir()
        if name == "tuned":
            tensors["layer.3"] = tensors["layer.3"] + np.float32(1e-3)
        save_file(tensors, tmp_path / name / "model.safetensors")
    base, same, tuned = (weights_digest(str(tmp_path / n)) for n in ("base", "same", "tuned"))
    assert base == same
    assert base != tuned


@pytest.mark.parametrize("at", [1 << 20, (17 << 20) + 512, -1], ids=["start", "middle", "end"])
def test_a_change_of_a_part_of_a_large_tensor_is_seen_there(tmp_path: Path, at: int) -> None:
    from safetensors.numpy import save_file

    tensors = {"a": np.zeros(1 << 20, np.uint8), "b": np.zeros(40 << 20, np.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    before = weights_digest(str(tmp_path))
    both = np.concatenate([tensors["a"], tensors["b"]])
    both[at] = 1
    tensors["b"] = both[1 << 20 :]
    save_file(tensors, tmp_path / "model.safetensors")
    assert weights_digest(str(tmp_path)) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"model_weights": "s3://models/base"},
        {"model": "org/base", "revision": "main"},
        {"trust_remote_code": True, "hf": {"auto_map": {"AutoModel": "org/other--code.Model"}}},
    ],
    ids=["bucket", "branch", "code of another repository"],
)
def test_what_nothing_proves_is_shared_with_nobody(model: Path, changes: dict[str, Any]) -> None:
    """Not with an engine of the same configuration, and not with the next boot."""
    made = config(**{"model": model, **changes})
    traits = proven(made, TRAITS)
    first, second = (namespace_of(made, traits, layout(), salt=salt) for salt in ("a", "b"))
    assert first.name != second.name
    assert first.doubt
    sure = config(model)
    known = namespace_of(sure, proven(sure, TRAITS), layout(), salt="a")
    assert not known.doubt
    assert known.name == named(sure, TRAITS, layout(), salt="b")


def test_a_model_of_one_file_is_told_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    found = []
    for value in (0, 1, 0):
        file.write_bytes(bytes([value]) * 200_000)
        found.append(named(config(file), TRAITS, layout()))
    assert found[0] == found[2] != found[1]


def test_equal_sets_in_a_configuration_are_equal_whatever_their_order(model: Path) -> None:
    """Of text it depends on the hash seed of the process: there were no hits after a restart."""
    one, other = set([0, 8]), set([8, 0])  # noqa: C405 - in the order of insertion, as they collide
    assert str(one) != str(other)
    found = [named(config(model, hf={"x": each}), TRAITS, layout()) for each in (one, other)]
    assert found[0] == found[1]


class Scale:
    """An override in Python, whose text does not identify it."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return "Scale()"


@pytest.mark.parametrize(
    "value",
    [Scale(2.0), object(), [{"rope": Scale(2.0)}], {1: Scale(2.0)}, print, torch.zeros(2)],
    ids=["equal text", "address", "nested", "by number", "function", "tensor"],
)
@pytest.mark.parametrize("where", ["hf", "quantization_config", "multimodal_config"])
def test_what_is_no_plain_data_is_shared_with_nobody(model: Path, value: Any, where: str) -> None:
    """Scales of 2 and 4 shared rows; an object with an address had none to share."""
    given: Any = {"x": value}
    if where == "multimodal_config":
        given = MultiModalConfig(mm_processor_kwargs=given)
    made = config(model, **{where: given})
    traits = proven(made, TRAITS)
    first, second = (namespace_of(made, traits, layout(), salt=salt) for salt in ("a", "b"))
    assert first.name != second.name
    assert "is no plain data" in first.doubt


class Kind(Enum):
    LINEAR = object()
    YARN = object()


@dataclass
class Args:
    dtype: torch.dtype
    kind: Kind
    path: tuple[int, ...] = ()


class OtherArgs(Args):
    """Of the same fields."""


@pytest.fixture
def of(model: Path) -> Callable[[Any], str]:
    """The namespace of an engine with this value in its configuration."""

    def named_by(value: Any) -> str:
        made = config(model, quantization_config=value)
        found = namespace_of(made, proven(made, TRAITS), layout(), salt="a")
        assert not found.doubt
        return found.name

    return named_by


def test_types_enumerations_and_records_are_plain(of: Callable[[Any], str]) -> None:
    args = Args(torch.bfloat16, Kind.YARN, (1, 2))
    assert of(args) == of(Args(torch.bfloat16, Kind.YARN, (1, 2)))
    others = [
        Args(torch.float16, Kind.YARN, (1, 2)), Args(torch.bfloat16, Kind.LINEAR, (1, 2)),
        Args(torch.bfloat16, Kind.YARN, (2, 1)), {1: "a", "1": "b"}, {1: "b", "1": "a"},
        {1: "a"}, {"1": "a"}, {True: "a"}, None, "None", b"a",
    ]  # fmt: skip
    others += [vars(args), OtherArgs(**vars(args))]
    assert len({of(value) for value in (args, *others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "value",
    [{"a"}, {1: "a"}, b"a", Kind.YARN, torch.float16, Args(torch.float16, Kind.YARN)],
)
def test_no_value_is_named_as_what_another_is_written_as(
    of: Callable[[Any], str], value: Any
) -> None:
    """A set was written as a list is, and an enumeration's member too."""
    written = _Plain().plain_value(value, "x")
    assert of(value) != of(written)
    assert of(value) == of(value)


def test_a_directory_without_weights_has_no_digest(tmp_path: Path) -> None:
    assert weights_digest(str(tmp_path)) is None


def test_a_draft_model_is_part_of_it(model: Path) -> None:
    drafted = config(model)
    drafted.speculative_config = SimpleNamespace(
        draft_model_config=config(model, dtype="bfloat16").model_config,
        draft_load_config=None,
        uses_draft_kv_cache=lambda: True,
    )
    assert named(drafted, TRAITS, layout()) != named(config(model), TRAITS, layout())
