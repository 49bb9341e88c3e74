"""A drafter's layers: which they are, and every byte of their heads over any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from transformers import (
    DeepseekV3Config,
    Gemma4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.transformers_utils.model_arch_config_convertor import Gemma4ModelArchConfigConvertor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, MLAAttentionSpec

from pdconn.planning.plan import Need, Pairing
from pdconn.planning.planning_errors import Incompatible
from pdconn.protocol.compat import trait_differences
from pdconn.protocol.ticket import BlockList
from pdconn.vllm.blocks.arrangement import Unit
from pdconn.vllm.blocks.drafts import draft_layers
from pdconn.vllm.blocks.geometry import kv_cache_references
from pdconn.vllm.blocks.heads import heads_by_layer, total_kv_heads
from pdconn.vllm.blocks.traits import block_traits
from registration import KVCacheReferences, RegistrationError
from tests.fakes.simulated.inspection import inspected_here
from tests.vllm.identity.known import SAME

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports

BLOCK, ROWS, CONTENT = 4, 3, 8
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
}
CONFIGS: dict[str, tuple[Callable[..., PretrainedConfig], str, dict[str, Any]]] = {
    "mla": (
        DeepseekV3Config,
        "DeepseekV3ForCausalLM",
        {"num_hidden_layers": 3, "n_routed_experts": 8, "moe_intermediate_size": 64,
         "num_nextn_predict_layers": 2},
    ),
    "llama": (LlamaConfig, "LlamaForCausalLM", {"num_hidden_layers": 2, "num_key_value_heads": 4}),
    "draft": (LlamaConfig, "LlamaForCausalLM", {"num_hidden_layers": 3, "num_key_value_heads": 2}),
    "eagle3": (
        LlamaConfig,
        "LlamaForCausalLMEagle3",
        {"num_hidden_layers": 1, "num_key_value_heads": 8},
    ),
    "eagle3-narrow": (
        LlamaConfig,
        "LlamaForCausalLMEagle3",
        {"num_hidden_layers": 1, "num_key_value_heads": 2},
    ),
    "qwen3-next": (
        Qwen3NextConfig,
        "Qwen3NextForCausalLM",
        {"num_hidden_layers": 4, "num_key_value_heads": 2},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """vLLM's own configuration of a target and its drafter, each made once."""
    work: Path = tmp_path_factory.mktemp("configs")
    known: dict[Any, Any] = {}

    def path(name: str) -> str:
        if not (work / name).exists():
            kind, architecture, changes = CONFIGS[name]
            config = kind(**SMALL, **changes)
            config.architectures = [architecture]
            config.save_pretrained(work / name)
        return str(work / name)

    def config(target: str, method: str | None, draft: str | None = None, tokens: int = 1) -> Any:
        key = target, method, draft, tokens
        if key not in known:
            model = ModelConfig(
                model=path(target), tokenizer=path(target), skip_tokenizer_init=True
            )
            speculation = None
            if method is not None:
                speculation = SpeculativeConfig(
                    target_model_config=model,
                    target_parallel_config=ParallelConfig(),
                    method=method,
                    model=None if draft is None else path(draft),
                    num_speculative_tokens=tokens,
                )
            cache = SimpleNamespace(cache_dtype="auto")
            known[key] = SimpleNamespace(
                model_config=model, speculative_config=speculation, cache_config=cache
            )
        return known[key]

    with inspected_here():
        yield config


TARGET, BEHIND = "model.layers.1.self_attn.attn", "model.layers.{}.self_attn.attn"
CASES = {
    "eagle3 on mla": (("mla", "eagle3", "eagle3"), BEHIND.format(3), None, 8),
    "narrow eagle3 on mla": (("mla", "eagle3", "eagle3-narrow"), BEHIND.format(3), None, 2),
    "mtp on mla": (("mla", "mtp"), "model.layers.3.mtp_block.self_attn.attn", None, None),
    "eagle3 on llama": (("llama", "eagle3", "eagle3"), BEHIND.format(2), 4, 8),
    "draft model": (
        ("llama", "draft_model", "draft"), "draft_model.model.layers.1.self_attn.attn", 4, 2,
    ),
    "mtp of qwen": (("qwen3-next", "mtp"), "mtp.layers.0.self_attn.attn", 2, 2),
}  # fmt: skip
"""vLLM's configuration, the draft layer's name, and heads of target and drafter; None is MLA."""


class Rank:
    """A rank with a layer of the target and one of its drafter.

    Every head and token has bytes of its own, in ``whole`` (layer, head, block, token, content).
    """

    def __init__(
        self, config: Any, heads: dict[str, int | None], rank: int, tp: int, totals: Any
    ) -> None:
        self.views: dict[str, torch.Tensor] = {}
        self.held: dict[str, list[int]] = {}
        groups, tensors, specs = [], [], {}
        for name, total in heads.items():
            count = max(1, (total or 1) // tp)
            first = rank * (total or 1) // tp
            self.held[name] = list(range(first, first + count))
            spec = _spec(total, count)
            size = ROWS * spec.page_size_bytes
            shape = (ROWS, spec.num_heads, BLOCK, spec.state_content_size_bytes)
            self.views[name] = torch.zeros(size, dtype=torch.int8).view(shape)
            tensors.append(
                KVCacheTensor(
                    size=size, layers=[name], layer_stride=size, block_stride=spec.page_size_bytes
                )
            )
            groups.append(SimpleNamespace(kv_cache_spec=spec, layer_names=[name]))
            specs[name] = spec
        cache: Any = SimpleNamespace(
            kv_cache_tensors=tensors, transfer_groups=groups, num_blocks_of=lambda tensor: ROWS
        )
        self.references: KVCacheReferences = kv_cache_references(
            cache,
            self.views,
            layout="LBHNC",
            total_kv_heads=(totals or heads_by_layer)(config, {}, specs),
            states=lambda spec: (),
            units=lambda layer, spec: Unit.TOKEN,
            tp_rank=rank,
            tp_size=tp,
        )


def _spec(total: int | None, count: int) -> Any:
    if total is None:
        return MLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=CONTENT, dtype=torch.int8
        )
    return FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=count, head_size=CONTENT // 2, dtype=torch.int8
    )


def of_the_target(config: Any, layers: Any, specs: Any) -> Callable[[str], int | None]:
    """As it was: every layer's heads are the target's."""
    return lambda layer: total_kv_heads(config.model_config, layer)


def whole(heads: dict[str, int | None]) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    return {
        name: torch.randint(1, 127, (ROWS, total or 1, BLOCK, CONTENT), generator=source).to(
            torch.int8
        )
        for name, total in heads.items()
    }


def wrong(case: str, made: Any, theirs: int, ours: int, totals: Any = None) -> list[str]:
    """Layers of any rank that differ from the whole model's after a pull of two blocks."""
    arguments, layer, target_heads, draft_heads = CASES[case]
    heads = {TARGET: target_heads, layer: draft_heads}
    config, bytes_of = made(*arguments), whole(heads)
    there = [Rank(config, heads, rank, theirs, totals) for rank in range(theirs)]
    for rank in there:
        for name, view in rank.views.items():
            view.copy_(bytes_of[name][:, rank.held[name]])
    found = []
    for number in range(ours):
        rank = Rank(config, heads, number, ours, totals)
        pairing = Pairing.between(rank.references, [one.references for one in there], number)
        wanted, lent = BlockList(0, (2, 1)), BlockList(0, (1, 2))
        for their_rank, spans in pairing.plan(
            Need.for_range(0, 8, (wanted,) * 2), (lent,) * 2
        ).reads:
            _copy(spans, list(there[their_rank].views.values()), list(rank.views.values()))
        for name, view in rank.views.items():
            want = bytes_of[name][:, rank.held[name]]
            if not (torch.equal(view[2], want[1]) and torch.equal(view[1], want[2])):
                found.append(f"{name} of rank {number}")
    return found


def _copy(spans: Any, theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> None:
    for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
        source, target = _at(theirs, int(remote)), _at(ours, int(local))
        target[: int(nbytes)] = source[: int(nbytes)]


def _at(views: list[torch.Tensor], address: int) -> torch.Tensor:
    for view in views:
        if 0 <= address - view.data_ptr() < view.numel():
            return view.view(-1)[address - view.data_ptr() :]
    raise AssertionError("outside the engine's memory")


SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 1), (1, 4)]


@pytest.mark.parametrize("case", CASES)
def test_every_byte_of_a_drafters_heads_is_in_place(case: str, made: Any) -> None:
    for theirs, ours in SIZES:
        assert wrong(case, made, theirs, ours) == [], (theirs, ours)


@pytest.mark.parametrize(
    "case", ["narrow eagle3 on mla", "eagle3 on mla", "eagle3 on llama", "draft model"]
)
def test_a_drafter_taken_for_a_part_of_the_target_is_noticed(case: str, made: Any) -> None:
    """Negative control: refused, or heads of other ranks."""
    for theirs, ours in [(1, 2), (2, 1), (4, 2), (2, 4)]:
        try:
            found: object = wrong(case, made, theirs, ours, of_the_target)
        except (RegistrationError, Incompatible) as error:
            found = error
        assert found, (theirs, ours)


def test_the_target_is_described_as_before(made: Any) -> None:
    config = made("llama", "draft_model", "draft")
    totals = heads_by_layer(config, {}, {TARGET: None, "draft_model.model.layers.1.attn": None})
    assert totals(TARGET) == 4
    assert heads_by_layer(made("llama", None), {}, {TARGET: None})(TARGET) == 4


MARK = SimpleNamespace(is_draft_layer=True)


@pytest.mark.parametrize(
    ("layers", "specs", "drafts"),
    [
        ({}, {"model.layers.0.attn": None, "model.layers.2.attn": None}, {"model.layers.2.attn"}),
        ({}, {"model.layers.1.attn": None, "model.mtp.layers.0.attn": None},
         {"model.mtp.layers.0.attn"}),
        ({}, {"model.layers.0.attn": None, "draft_model.model.layers.0.attn": None},
         {"draft_model.model.layers.0.attn"}),
        # Model runner V2: any name.
        ({"b.layers.0": MARK}, {"model.layers.7": None, "b.layers.0": None}, {"b.layers.0"}),
        # vLLM 0.33.
        ({}, {"model.layers.7": None, "b.layers.0": SimpleNamespace(is_draft=True)},
         {"b.layers.0"}),
    ],
    ids=["number", "mtp", "draft_model", "marked layer", "marked specification"],
)  # fmt: skip
def test_a_drafters_layers_are_known(layers: Any, specs: Any, drafts: set[str], made: Any) -> None:
    assert draft_layers(made("llama", "eagle3", "eagle3"), layers, specs) == drafts
    for method in (None, "ngram"):
        assert draft_layers(made("llama", method), layers, specs) == set()


def traits(config: Any) -> dict[str, str]:
    return block_traits(config, {}, {}, SAME)


def named(ours: Any, theirs: Any) -> list[str]:
    return [str(one) for one in trait_differences(traits(ours), traits(theirs))]


def test_decode_with_a_drafter_needs_a_prefill_engine_with_one(made: Any) -> None:
    """It said ``layer model.layers.2... chunk 0: theirs not held, ours held``."""
    ours = made("llama", "eagle3", "eagle3")
    expected = ["speculative_config.method: theirs nothing, ours eagle3"]
    assert named(ours, made("llama", None)) == expected
    assert named(ours, made("llama", "ngram")) == expected


def test_decode_without_a_drafter_needs_none_and_ignores_one(made: Any) -> None:
    for ours in (made("llama", None), made("llama", "ngram")):
        for theirs in (made("llama", "eagle3", "eagle3"), made("llama", None)):
            assert named(ours, theirs) == []


def test_another_drafter_is_refused_by_name(made: Any) -> None:
    ours = made("llama", "eagle3", "eagle3")
    assert named(ours, made("llama", "eagle3", "eagle3-narrow")) == [
        "speculative_config.model: theirs eagle3-narrow, ours eagle3",
        "speculative_config.model.num_key_value_heads: theirs 2, ours 8",
    ]
    other = named(ours, made("llama", "draft_model", "draft"))
    assert "speculative_config.method: theirs draft_model, ours eagle3" in other


def test_how_many_tokens_are_drafted_may_differ(made: Any) -> None:
    assert named(made("llama", "eagle3", "eagle3", 2), made("llama", "eagle3", "eagle3", 4)) == []
    assert named(made("mla", "mtp", None, 2), made("mla", "mtp", None, 4)) == [], "two modules"


def test_mtp_modules_that_prefill_does_not_compute_are_refused_by_name(made: Any) -> None:
    """Of two modules only the first computes where one token is drafted."""
    assert named(made("mla", "mtp", None, 2), made("mla", "mtp", None, 1)) == [
        "speculative_config.modules: theirs 1, ours 2"
    ]


@pytest.mark.parametrize("name", ["draft_model.model.layers.{}.attn", "model.layers.{}.attn"])
def test_layers_of_a_drafter_that_differ_have_their_own_number(name: str) -> None:
    """They are numbered from the drafter's first one on, whatever their names say."""
    config = Gemma4TextConfig(
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        head_dim=32,
        global_head_dim=64,
    )
    arch = Gemma4ModelArchConfigConvertor(config, config).convert()
    model = SimpleNamespace(use_mla=False, hf_text_config=config, model_arch_config=arch)
    engine = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 40),
        speculative_config=SimpleNamespace(
            uses_draft_kv_cache=lambda: True, draft_model_config=model
        ),
    )
    model.get_total_num_kv_heads = lambda: arch.total_num_kv_heads
    first = 0 if name.startswith("draft") else 40
    names = [name.format(first + index) for index in range(6)]
    totals = heads_by_layer(engine, {}, dict.fromkeys(names))
    assert [totals(each) for each in names] == [8, 8, 8, 8, 8, 2]
