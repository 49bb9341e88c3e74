"""Other families: MLA, chunked attention; prefill to decode, with real vLLM and NIXL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import compare, distance, make_prompts
from pdconn.tools.lab.lab_client import Client, ask_both, prefill_only, prefill_then_decode
from pdconn.tools.lab.ports import free_ports
from tests.forked.engines import running
from tests.vllm.engines.engines import cache_beside
from tests.vllm.engines.families.handover import STEPS, engine, handing_over
from tests.vllm.engines.families.models import GPT_OSS, LLAMA_4, MLA, Family

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("family", [LLAMA_4, GPT_OSS], ids=lambda family: family.name)
def test_chunks_and_windows(family: Family, tmp_path: Path) -> None:
    """Chunks of 64 tokens, or windows of 128 with sinks, in blocks of 32; and full attention."""
    prompts = make_prompts(family.lengths(), seed=5)
    model = family.write(tmp_path / "model")
    faults = {"reads": {"corrupt": 1.0}}
    specs = [
        engine("prefill", family, model, "kv_producer", prefix_caching=True, args=STEPS),
        engine("decode", family, model, "kv_consumer", prefix_caching=True),
        engine("flipped", family, model, "kv_consumer", verify="off", debug_faults=faults),
    ]
    with handing_over(family, tmp_path, specs, model) as made:
        assert made.mismatches(prompts) == []
        assert made.metric("pulls_verified_total") == len(prompts)
        assert made.mismatches(prompts) == []
        assert made.metric("saved_by_hits_bytes_total") > 0
        full = make_prompts([8 * 32] * 4, seed=9)  # one more token: every byte pulled matters
        assert len(made.mismatches(full, decode="flipped")) == 4
        made.follow(seed=15)
        assert len(made.mismatches(full, decode="flipped", like=made.like())) == 4


def in_tree(spec, port: int):
    """The same engine with vLLM's own connector."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
    }
    return replace(spec, kv_transfer_config=transfer, side_channel_port=port)


def test_mla(tmp_path: Path) -> None:
    """The KV of a prompt of n + 1 tokens is not bit for bit that of n in the CPU's kernels, so
    answers are compared with those of vLLM's own connector over the same model."""
    prompts = make_prompts(MLA.lengths(), seed=5)
    model = MLA.write(tmp_path / "model")
    sides = free_ports(2)
    faults = {"reads": {"corrupt": 1.0}}
    specs = [
        engine("prefill", MLA, model, "kv_producer"),
        engine("decode", MLA, model, "kv_consumer"),
        engine("flipped", MLA, model, "kv_consumer", verify="off", debug_faults=faults),
        in_tree(engine("their-prefill", MLA, model, "kv_producer"), sides[0]),
        in_tree(engine("their-decode", MLA, model, "kv_consumer"), sides[1]),
    ]
    with running(specs, tmp_path, cache=cache_beside(model)) as started:
        prefill, decode, flipped, their_prefill, their_decode = (Client(e.url) for e in started)
        answers, like = set(), prefill_only(prefill, prompts[0])  # decode pulls nothing of it
        assert like is not None
        for number, prompt in enumerate(prompts):
            theirs = prefill_then_decode(their_prefill, their_decode, prompt, 8)
            ours = prefill_then_decode(prefill, decode, prompt, 8)
            assert compare(theirs, ours) is None, len(prompt)
            answers.add(ours.tokens)
            if number % 4 == 3:
                followed, _ = ask_both(prefill, decode, prompt, 8, like=like)
                assert compare(theirs, followed) is None, len(prompt)
        assert len(answers) == len(prompts)
        seen, num_followed = decode.metrics(), len(prompts) // 4
        assert seen["pdconn:pulls_followed_total"] == num_followed
        assert seen["pdconn:pulls_verified_total"] == len(prompts) - 1 + num_followed
        for prompt in make_prompts([8 * 16 + 1] * 4, seed=9):
            theirs = prefill_then_decode(their_prefill, their_decode, prompt, 8)
            seen = prefill_then_decode(prefill, flipped, prompt, 8)
            assert distance(theirs, seen) > 1e-3
