"""Which backends pair: those whose pages have the same bytes, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
import vllm.config  # noqa: F401 - before its parts, which import each other
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
)

from pdconn.planning.plan import Need, Pairing
from pdconn.planning.planning_errors import Incompatible
from pdconn.protocol.compat import Difference, trait_differences
from pdconn.protocol.limits import MAX_TEXT
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import BlockList
from pdconn.puller.peers import Rank as PullingRank
from pdconn.vllm.blocks import arrangement
from pdconn.vllm.blocks.arrangement import Unit, arrangement_of
from pdconn.vllm.blocks.geometry import kv_cache_references
from pdconn.vllm.blocks.pages import Pages
from pdconn.vllm.blocks.traits import block_traits
from registration import KVCacheReferences, RegistrationError
from tests.vllm.identity.known import SAME


class Platform:
    """What is asked of vLLM's platform."""

    def __init__(self, name: str) -> None:
        self._name = name

    def is_rocm(self) -> bool:
        return self._name == "rocm"

    def is_cpu(self) -> bool:
        return self._name == "cpu"


@pytest.fixture(autouse=True)
def cuda(monkeypatch: Any) -> None:
    monkeypatch.setattr(arrangement, "current_platform", Platform("cuda"))


def layer(backend: str, **more: Any) -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend), **more)


def attention(**changes: Any) -> Any:
    return FullAttentionSpec(
        **{"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": torch.int8, **changes}
    )


def mla(**changes: Any) -> Any:
    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 6, "max_tp_shards": 1}
    return MLAAttentionSpec(block_size=4, dtype=torch.int8, **{**shape, **changes})


def state(**changes: Any) -> Any:
    return MambaSpec(
        **{
            "block_size": 4,
            "shapes": ((3, 10), (2, 4, 5)),
            "dtypes": (torch.bfloat16, torch.float32),
            "mamba_type": MambaAttentionBackendEnum.GDN_ATTN,
            **changes,
        }
    )


def traits(spec: Any, one: Any, layout: str = "LBHNC", **config: Any) -> dict[str, str]:
    model = SimpleNamespace(model="m", dtype="bfloat16", hf_text_config=SimpleNamespace(**config))
    cache = SimpleNamespace(
        cache_dtype="auto", get_resolved_kv_cache_layout=lambda: SimpleNamespace(name=layout)
    )
    engine: Any = SimpleNamespace(model_config=model, cache_config=cache, speculative_config=None)
    return block_traits(engine, {"layer": one}, {"layer": spec}, SAME)


DENSE = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION")
LATENT = ("FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "CUTLASS_MLA", "TRITON_MLA", "CPU_MLA")
FP8 = {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
INLINE_SCALES = {"kv_quant_mode": KVQuantMode.FP8_PER_TOKEN_HEAD, "state_content_bytes": 24}


@pytest.mark.parametrize("changes", [{}, FP8], ids=["plain", "fp8 per tensor"])
@pytest.mark.parametrize(
    ("make", "names"), [(attention, DENSE), (mla, LATENT)], ids=["key, value", "latent"]
)
def test_backends_of_the_same_bytes_pair(make: Any, names: Any, changes: Any) -> None:
    """H100 prefill (FLASH_ATTN) to B200 decode (FLASHINFER) was refused by name."""
    found = [traits(make(**changes), layer(name)) for name in names]
    assert all(trait_differences(one, found[0]) == () for one in found)
    units = {arrangement_of(make(**changes), layer(name), "LBNHC").unit for name in names}
    assert units == {Unit.TOKEN}


def content(theirs: str, ours: str) -> tuple[Difference, ...]:
    return (Difference("block_content", theirs, ours),)


@pytest.mark.parametrize(
    ("theirs", "ours", "named"),
    [
        ((attention(), layer("HPC_ATTN")), (attention(), layer("FLASH_ATTN")),
         content("HPC_ATTN", "key, value")),
        ((mla(), layer("FLASHMLA_SPARSE")), (mla(), layer("DEEPSEEK_V32_INDEXER")),
         content("latent", "DEEPSEEK_V32_INDEXER")),
        ((attention(), layer("CPU_ATTN", isa="amx")), (attention(), layer("CPU_ATTN", isa="vec")),
         content("CPU_ATTN:amx", "CPU_ATTN:vec")),
        ((attention(), layer("CPU_ATTN", isa="vec")), (attention(), layer("FLASH_ATTN")),
         content("CPU_ATTN:vec", "key, value")),
        ((attention(**INLINE_SCALES), layer("TRITON_ATTN")),
         (attention(**FP8), layer("FLASHINFER")),
         content("TRITON_ATTN:FP8_PER_TOKEN_HEAD", "key, value")),
        ((mla(state_content_bytes=656), layer("FLASHMLA_SPARSE")), (mla(), layer("FLASHMLA")),
         content("FLASHMLA_SPARSE:NONE", "latent")),
        ((attention(), layer("TURBOQUANT")), (attention(), layer("FLASH_ATTN")),
         content("TURBOQUANT", "key, value")),
        ((attention(num_head_slots=2, state_content_bytes=16), layer("B12X")),
         (attention(), layer("FLASHINFER")), content("B12X:NONE", "key, value")),
    ],
)  # fmt: skip
def test_backends_of_other_bytes_are_refused_by_name(theirs: Any, ours: Any, named: Any) -> None:
    assert trait_differences(traits(*ours), traits(*theirs)) == named


def test_rocm_keeps_its_names(monkeypatch: Any) -> None:
    """Its FLASH_ATTN is another backend, and its FP8 may be another format."""
    here = traits(attention(), layer("FLASH_ATTN"))
    monkeypatch.setattr(arrangement, "current_platform", Platform("rocm"))
    there = traits(attention(), layer("FLASH_ATTN"))
    assert trait_differences(here, there) == content("ROCm FLASH_ATTN", "key, value")


def test_nvfp4_pages_of_another_order_of_heads_are_refused() -> None:
    spec = attention(num_head_slots=4, state_content_bytes=9, kv_quant_mode=KVQuantMode.NVFP4)
    theirs, ours = (traits(spec, layer("FLASHINFER"), layout) for layout in ("LBHNC", "LBNHC"))
    assert trait_differences(ours, theirs) == content(
        "FLASHINFER:NVFP4:HNC", "FLASHINFER:NVFP4:NHC"
    )


@pytest.mark.parametrize(
    ("changes", "theirs"),
    [
        ({"mamba_type": MambaAttentionBackendEnum.MAMBA2}, "MAMBA2: SD window of 3 bfloat16, "),
        (
            {"dtypes": (torch.bfloat16, torch.bfloat16)},
            "GDN_ATTN: SD window of 3 bfloat16, 4 x 5 b",
        ),
        ({"shapes": ((4, 10), (2, 4, 5))}, "GDN_ATTN: SD window of 4 bfloat16, 4 x 5 float32"),
        ({"shapes": ((3, 10), (2, 5, 4))}, "GDN_ATTN: SD window of 3 bfloat16, 5 x 4 float32"),
    ],
    ids=["type", "dtype", "window", "head"],
)
def test_states_that_differ_are_refused_by_name(changes: Any, theirs: str) -> None:
    [found] = trait_differences(traits(state(), None), traits(state(**changes), None))
    assert (found.field, found.ours) == (
        "states",
        "GDN_ATTN: SD window of 3 bfloat16, 4 x 5 float32",
    )
    assert found.theirs.startswith(theirs[:40])


def test_states_divided_over_other_ranks_are_the_same_states() -> None:
    halves = state(shapes=((3, 5), (1, 4, 5)))
    assert traits(halves, None) == traits(state(), None)


def test_windows_of_the_other_order_are_refused(monkeypatch: Any) -> None:
    there = traits(state(), None)
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    here = traits(state(shapes=((10, 3), (2, 4, 5))), None)
    [found] = trait_differences(here, there)
    assert "SD window of 3" in found.theirs
    assert "DS window of 3" in found.ours


def test_rotary_parameters_are_compared_whatever_their_order() -> None:
    """transformers 5 keeps theta and scaling there."""
    spec, one = attention(), layer("FLASH_ATTN")
    made = {"rope_theta": 1e4, "rope_type": "default"}
    ours = traits(spec, one, rope_parameters=made)
    assert ours == traits(spec, one, rope_parameters=dict(reversed(list(made.items()))))
    [found] = trait_differences(
        ours, traits(spec, one, rope_parameters={**made, "rope_theta": 1e6})
    )
    assert found.field == "model.rope_parameters"
    assert "rope_theta: 1000000.0" in found.theirs


def test_values_too_long_for_a_trait_differ_by_their_digest() -> None:
    """Long-context scaling has a number for each frequency; the last one counts, too."""

    def of(last: float) -> dict[str, str]:
        factors = {"long_factor": [1.0] * 200 + [last]}
        return traits(attention(), layer("FLASH_ATTN"), rope_parameters=factors)

    assert all(len(value) <= MAX_TEXT for value in of(1.0).values())
    assert [one.field for one in trait_differences(of(1.0), of(2.0))] == ["model.rope_parameters"]
    cut = {name: value[:400] for name, value in of(1.0).items()}
    assert cut == {name: value[:400] for name, value in of(2.0).items()}, "control"


class Rank:
    """A tensor-parallel rank of an engine with one layer of pages that move in larger pieces."""

    def __init__(self, spec: Any, unit: Unit, rank: int, tp: int, layout: str = "LBHNC") -> None:
        self.spec, blocks = spec, 3
        page = spec.page_size_bytes
        self.memory = torch.zeros(blocks * page, dtype=torch.int8)
        tensor = KVCacheTensor(
            size=blocks * page, layers=["layer"], layer_stride=blocks * page, block_stride=page
        )
        shape = (blocks, spec.num_heads, spec.block_size, spec.state_content_size_bytes)
        if layout == "LBHNC":
            self.view = self.memory.view(shape)
        else:
            self.view = self.memory.view(blocks, shape[2], shape[1], shape[3]).transpose(1, 2)
        config: Any = SimpleNamespace(
            kv_cache_tensors=[tensor],
            transfer_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])],
            num_blocks_of=lambda tensor: blocks,
        )
        self.references: KVCacheReferences = kv_cache_references(
            config,
            {"layer": self.view},
            layout=layout,
            total_kv_heads=lambda layer: 4,
            states=lambda spec: (),
            units=lambda layer, spec: unit,
            tp_rank=rank,
            tp_size=tp,
        )


def slots(spec_heads: int, backend: str) -> Any:
    """As the backend's ``customize_spec`` makes it of dense content."""
    if backend == "B12X":
        return attention(
            num_kv_heads=spec_heads, num_head_slots=2, state_content_bytes=spec_heads * 8
        )
    return attention(
        num_kv_heads=spec_heads,
        num_head_slots=2 * spec_heads,
        state_content_bytes=9,
        kv_quant_mode=KVQuantMode.NVFP4,
    )


def engine(backend: str, tp: int, layout: str = "LBHNC") -> list[Rank]:
    unit = arrangement_of(slots(4 // tp, backend), layer(backend), layout).unit
    return [Rank(slots(4 // tp, backend), unit, rank, tp, layout) for rank in range(tp)]


def pull(theirs: list[Rank], ours: list[Rank]) -> None:
    for number, rank in enumerate(ours):
        pairing = Pairing.between(rank.references, [one.references for one in theirs], number)
        plan = pairing.plan(Need.for_range(0, 8, (BlockList(0, (2, 1)),)), (BlockList(0, (1, 2)),))
        target = rank.memory.numpy()
        for their_rank, spans in plan.reads:
            source = theirs[their_rank].memory.numpy()
            for local, remote, nbytes in zip(spans.local, spans.remote, spans.nbytes, strict=True):
                at, origin = int(local) - target.ctypes.data, int(remote) - source.ctypes.data
                target[at : at + int(nbytes)] = source[origin : origin + int(nbytes)]


def planes(ranks: list[Rank]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(slot, head of the model, tokens), as ``_kv_cache_views`` of B12X divides pages."""
    for number, rank in enumerate(ranks):
        heads = rank.spec.num_kv_heads
        for slot, plane in enumerate(rank.view.unbind(1)):
            for head, cells in enumerate(plane.unflatten(-1, (heads, 8)).unbind(2)):
                yield slot, number * heads + head, cells


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (2, 4)])
def test_planes_of_keys_and_values_are_divided_by_heads(theirs: int, ours: int) -> None:
    """Slots passed for heads: refused at most tensor-parallel sizes, and not found at others."""
    there, here = engine("B12X", theirs), engine("B12X", ours)
    for slot, head, cells in planes(there):
        cells.copy_(torch.arange(cells.numel()).view(cells.shape) % 90 + 10 * head + 5 * slot)
    pull(there, here)
    want = {(slot, head): cells for slot, head, cells in planes(there)}
    for slot, head, cells in planes(here):
        assert torch.equal(cells[2], want[slot, head][1])
        assert torch.equal(cells[1], want[slot, head][2])
        assert cells[1].any(), "control: something came"


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("tp", [1, 2])
def test_nvfp4_pages_move_whole_between_equal_ranks(tp: int, layout: str) -> None:
    """A side's scales follow all its values, so that no slot is a head's."""
    there, here = engine("FLASHINFER", tp, layout), engine("FLASHINFER", tp, layout)
    for number, rank in enumerate(there):
        rank.memory.copy_(torch.from_numpy(np.random.default_rng(number).integers(
            1, 100, len(rank.memory), dtype=np.int8)))  # fmt: skip
    pull(there, here)
    for theirs, ours in zip(there, here, strict=True):
        assert torch.equal(ours.view[2], theirs.view[1])
        assert torch.equal(ours.view[1], theirs.view[2])
        assert not ours.view[0].any()


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_nvfp4_pages_of_other_ranks_are_refused(theirs: int, ours: int) -> None:
    """Slots are no heads: one of theirs would pass for one of ours, key for value."""
    ranks = [one.references for one in engine("FLASHINFER", theirs)]
    for number, rank in enumerate(engine("FLASHINFER", ours)):
        with pytest.raises(Incompatible, match=r"bytes per head|head \d of layer layer"):
            Pairing.between(rank.references, ranks, number)
        name = arrangement_of(rank.spec, layer("FLASHINFER"), "LBHNC").name
        traits = {"block_content": name}
        geometry = tuple(RankGeometry(0, n, b"", one) for n, one in enumerate(ranks))
        welcome = Welcome.in_our_version("prefill", "boot", traits, geometry)
        me = PullingRank("decode", number, ours, number, rank.references, traits)
        with pytest.raises(Incompatible, match=r"\(block_content FLASHINFER:NVFP4:HNC\)"):
            me.pair(welcome)


@pytest.mark.parametrize(("unit", "what"), [(Unit.PAGE, "pages"), (Unit.HEAD, "tokens of a head")])
def test_what_only_moves_whole_must_lie_in_one_piece(unit: Unit, what: str) -> None:
    layout = {Unit.PAGE: "LHBNC", Unit.HEAD: "LBNHC"}[unit]
    tensor = KVCacheTensor(size=0, layers=["layer"], layer_stride=9, block_stride=9)
    view = torch.zeros(3, 2, 4, 16)
    page = Pages("layer", attention(), layout, tensor, 3, view)
    with pytest.raises(RegistrationError, match=f"layer: layout: .* which {what} .* got {layout}"):
        page.block_chunks(unit, 0, 1)
    for other in ("LBHNC", "BLHNC"):
        Pages("layer", attention(), other, tensor, 3, view).block_chunks(unit, 0, 1)
