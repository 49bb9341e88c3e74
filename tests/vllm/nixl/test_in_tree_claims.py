"""What ``docs/from-nixlconnector.md`` says of vLLM's own NIXL connectors, asked of their code.

``make check-next`` runs this on the next vLLM's files too, so that a row of the page cannot go
stale.  What can be called is called, with stand-ins for NIXL and the engine; of the rest the lines
that a row rests on are looked for, by ``LINES``.
"""

from __future__ import annotations

import inspect
import re
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch's and others', about each other
    from vllm.distributed.kv_transfer.kv_connector.utils import (
        EngineTransferInfo,
        TransferTopology,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_worker, push_worker
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import (
        NixlBaseConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
    from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.project.docs.generate import DOCS
from tests.vllm.nixl.test_checks_by_name import installed

NIXL = "distributed/kv_transfer/kv_connector/v1/nixl/"
HEADS, HEAD_NBYTES = 4, 512

LINES = {
    "a read that was late": (
        # Prefill only logs it, and goes on to its next message.
        (NIXL + "pull_worker.py", 'logger.error( "Potentially invalid KV blocks for '),
    ),
    "a read that fails": (
        (NIXL + "base_worker.py", "failed_recving=failed_recv_reqs"),
        ("v1/core/sched/scheduler.py", "def _handle_failed_recving("),
    ),
    "renewals": (
        (NIXL + "pull_worker.py", "self._send_heartbeats(metadata)"),
        (NIXL + "push_worker.py", "self._send_heartbeats(metadata)"),
    ),
    "pipeline parallelism with hybrid models": (
        (NIXL + "base_worker.py", "if self._is_hma_required and not self._supports_pp_hma: raise"),
        (NIXL + "base_worker.py", "with Mamba/SSM hybrid KV cache layouts yet."),
        (NIXL + "base_worker.py", 'kv_role == "kv_consumer": raise NotImplementedError('),
        (NIXL + "base_worker.py", '"Attention-HMA push does not support decode TP greater than "'),
    ),
    "sliding-window layers": (
        (NIXL + "base_scheduler.py", "if n_sw := self.blocks_per_sw[i]: blocks = blocks[-n_sw:]"),
    ),
    "a prefix that decode holds, beside windows": (
        ("v1/core/kv_cache_manager.py", "if not ( self.kv_cache_config.has_mamba_layers and"),
    ),
    "state layers": (
        (NIXL + "base_worker.py", "if self._has_mamba: assert self._is_hma_required"),
        (NIXL + "base_worker.py", "assert is_conv_state_dim_first(), ("),
        ("model_executor/layers/mamba/mamba_utils.py", 'return layout return "SD"'),
    ),
    "decode to prefill": (
        (NIXL + "pull_scheduler.py", "min(remote_num_tokens, request.num_prompt_tokens) - num"),
        (NIXL + "push_scheduler.py", '"Bidirectional KV transfer is not supported for NIXL push'),
    ),
    "cross-layer blocks": (
        # Every layer of such a row begins at one address, and is registered once.
        (NIXL + "base_worker.py", "if base_addr in seen_base_addresses"),
    ),
}
"""Rows of the page, and lines of vLLM that they rest on, with single spaces for white space."""


def rows() -> list[str]:
    """The first cells of the table."""
    page = (DOCS / "from-nixlconnector.md").read_text(encoding="utf-8")
    section = page.partition("## What is different")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)


def row(title: str) -> str:
    """The whole line of a row."""
    page = (DOCS / "from-nixlconnector.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^\| {re.escape(title)}[^|]*\|.*$", page, re.MULTILINE)
    return str(found)


def has(source: str, line: str) -> bool:
    return line in " ".join(source.split())


@pytest.mark.parametrize("title", LINES)
def test_the_lines_that_a_row_rests_on_are_there(title: str) -> None:
    assert any(cell.startswith(title) for cell in rows()), title
    for file, line in LINES[title]:
        source = (installed() / file).read_text(encoding="utf-8")
        assert has(source, line), f"{file} has no more {line!r}: read it anew, and the row"


def test_a_line_that_is_gone_would_be_noticed() -> None:
    """Negative control."""
    assert has("if  one:\n    raise", "if one: raise")
    assert not has("if one:\n    return", "if one: raise")


# Which thread moves the bytes


def threads(module: Any) -> list[str]:
    """Names of the threads that a worker's module starts."""
    return re.findall(r'name="([\w-]+)"', inspect.getsource(module))


def test_the_pulling_connector_reads_on_the_models_thread_and_the_pushing_one_does_not() -> None:
    assert "threading" not in inspect.getsource(pull_worker)
    assert "self._read_blocks_for_req(" in inspect.getsource(
        pull_worker.NixlPullConnectorWorker.start_load_kv
    ), "what the model's thread calls in each step"
    assert threads(push_worker) == ["nixl-push-writer"]
    assert "NixlPushConnector" in row("reads are posted by")


def test_the_side_channel_has_neither_keys_nor_ciphers() -> None:
    source = "".join(
        path.read_text(encoding="utf-8").lower() for path in (installed() / NIXL).glob("*.py")
    )
    assert "zmq.router" in source
    for word in ("curve", "tls", "hmac", "secret", "checksum", "crc32"):
        found = re.findall(rf"\b{word}\w*", source)
        # vLLM 0.33 names UCX's TLS variable, which is a list of transports.
        assert not found or re.search(rf"{word}=\^cuda_ipc", source), (word, found)


# What two engines may differ in


def topology(*, ours: int, theirs: int, block: tuple[int, int] = (16, 16)) -> TransferTopology:
    made = TransferTopology(
        tp_rank=0,
        tp_size=ours,
        block_size=block[0],
        engine_id="ours",
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=HEADS,
        attn_backends=[],
    )
    made.register_remote_engine("theirs", EngineTransferInfo(theirs, 0, block[1], 1))
    return made


def meet(
    *,
    decode: int,
    prefill: int,
    block: tuple[int, int] = (16, 16),
    layouts: tuple[str, str] = ("LBHNC", "LBHNC"),
) -> None:
    """The check of decode that vLLM makes in a handshake, of a model with ``HEADS`` heads."""
    lens = [
        max(1, HEADS // size) * HEAD_NBYTES * tokens // 16
        for size, tokens in zip((decode, prefill), block, strict=True)
    ]
    worker = SimpleNamespace(
        transfer_topo=topology(ours=decode, theirs=prefill, block=block),
        dcp_size=1,
        use_mla=False,
        use_host_buffer=False,
        enable_permute_local_kv=False,
        kv_cache_layout=layouts[0],
        kv_transfer_config=SimpleNamespace(enable_permute_local_kv=False),
        backend_name="FLASH_ATTN",
        block_len_per_layer=[lens[0]],
        dst_num_blocks={"theirs": 8},
        dst_region_group_ids={"theirs": [0]},
        region_group_ids=[0],
        region_names=["layer"],
        _has_mamba=False,
        _is_hma_required=False,
        _is_region_replicated=lambda _region: False,
        _physical_blocks_per_logical_kv_block=1,
        _transfer_layer_region_indices=[],
        _transfer_layer_names=[],
        _head_sharded_draft_regions=set(),
        _layer_specs={},
        _TRANSFER_MODE="pull",
    )
    theirs = NixlAgentMetadata(
        engine_id="theirs",
        agent_metadata=b"",
        kv_caches_base_addr=[0],
        device_id=0,
        num_blocks=8,
        block_lens=[lens[1]],
        block_strides=[lens[1]],
        kv_cache_layout=layouts[1],
        block_size=block[1],
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
    )
    NixlBaseConnectorWorker._validate_remote_agent_handshake(worker, theirs, prefill)


@pytest.mark.parametrize(("decode", "prefill"), [(1, 1), (4, 1), (8, 2), (1, 4), (2, 4)])
def test_tensor_parallelism_may_differ_either_way_up_to_the_heads(
    decode: int, prefill: int
) -> None:
    meet(decode=decode, prefill=prefill)
    ranks = compute_tp_mapping(topology(ours=decode, theirs=prefill), prefill, (FullAttentionSpec,))
    assert len(ranks.all_source_ranks) == max(1, prefill // decode)


@pytest.mark.parametrize(
    ("decode", "prefill", "block", "statement"),
    [
        (4, 8, (16, 16), "is_kv_replicated("),
        (1, 8, (16, 16), "is_kv_replicated("),
        (1, 2, (32, 16), "assert block_size_ratio == 1"),
        (2, 3, (16, 16), "assert remote_tp_size % self.tp_size == 0"),
        (3, 2, (16, 16), "assert self.tp_size % remote_tp_size == 0"),
        (1, 1, (16, 32), "assert self.block_size % remote_block_size == 0"),
        (1, 1, (48, 32), "assert self.block_size % remote_block_size == 0"),
    ],
)
def test_what_it_asserts_is_what_the_page_says(
    decode: int, prefill: int, block: tuple[int, int], statement: str
) -> None:
    with pytest.raises(AssertionError) as failed:
        meet(decode=decode, prefill=prefill, block=block)
    assert statement in str(failed.traceback[-1].statement)


def test_decodes_blocks_may_be_multiples_where_prefills_ranks_are_not_more() -> None:
    meet(decode=1, prefill=1, block=(64, 16))
    meet(decode=2, prefill=1, block=(64, 16))


@pytest.mark.parametrize(
    ("decode", "layouts", "text"),
    [
        (1, ("LBHNC", "LBNHC"), "same kv_cache_layout"),
        (1, ("BLHNC", "LBHNC"), "same kv_cache_layout"),
        (2, ("BHLNC", "BHLNC"), "contiguous heads"),
        (2, ("LBNHC", "LBNHC"), "contiguous heads"),
    ],
)
def test_layouts_that_it_refuses(decode: int, layouts: tuple[str, str], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        meet(decode=decode, prefill=1, layouts=layouts)


@pytest.mark.parametrize(("decode", "layout"), [(1, "BHLNC"), (1, "LBNHC"), (2, "BLHNC")])
def test_layouts_that_it_takes(decode: int, layout: str) -> None:
    """Negative control: equal ones, and of cross-layer ones with unequal ranks ``BLHNC``."""
    meet(decode=decode, prefill=1, layouts=(layout, layout))


# Blocks of another size, after a prefix hit


def paired(prompt: int, held: int, *, ours: int, theirs: int) -> list[tuple[int, int]]:
    """Tokens at which the blocks that it pairs begin: decode's, prefill's.

    Decode has blocks of ``ours`` tokens and holds the first ``held`` of ``prompt`` tokens; prefill
    has blocks of ``theirs``, as long as both are their own numbers.
    """
    worker: Any = SimpleNamespace(_group_spec_types=(FullAttentionSpec,), _has_mamba=False)
    for name in ("get_mapped_blocks", "_map_block_ids_for_block_size_ratio"):
        method = getattr(NixlBaseConnectorWorker, name)
        setattr(worker, name, method.__get__(worker))
    decode = [list(range(held // ours, -(-prompt // ours)))]
    prefill = [list(range(-(-prompt // theirs)))]
    decode, prefill = worker._map_block_ids_for_block_size_ratio(decode, prefill, ours // theirs)
    decode, prefill = NixlBaseConnectorWorker._apply_prefix_caching(worker, decode, prefill, 1, 1)
    return [(a * theirs, b * theirs) for a, b in zip(decode[0], prefill[0], strict=True)]


def test_blocks_of_another_size_are_paired_wrongly_after_a_prefix_hit() -> None:
    """It counts blocks from the prompt's end, where decode's last block is not full."""
    wrong = paired(prompt=44, held=16, ours=16, theirs=4)
    assert wrong[0] == (16, 12), "the tokens from 12 on are written where those from 16 on belong"
    assert np.all(np.diff(np.array(wrong), axis=1) == -4)
    assert "after a prefix hit" in row("unequal block sizes")


@pytest.mark.parametrize(("prompt", "held"), [(44, 0), (48, 16)])
def test_without_a_hit_or_with_a_full_last_block_they_are_right(prompt: int, held: int) -> None:
    """Negative control."""
    found = paired(prompt=prompt, held=held, ours=16, theirs=4)
    assert found == [(token, token) for token in range(held, prompt, 4)]
