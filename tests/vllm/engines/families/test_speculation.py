"""Speculation: prefill to decode, with real vLLM and NIXL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.lab_client import prefill_then_decode
from pdconn.tools.lab.lab_errors import RequestRefused
from pdconn.tools.lab.spec import EngineSpec
from tests.vllm.engines.families.drafters import (
    DRAFTED,
    LLAMA,
    MIMO,
    drafting,
    write_draft_model,
    write_eagle,
    write_mtp,
    write_target,
)
from tests.vllm.engines.families.handover import (
    Handover,
    Prompt,
    boundaries,
    engine,
    handing_over,
)
from tests.vllm.engines.families.models import Family

pytestmark = pytest.mark.matrix

PROMPTS = make_prompts(boundaries(32, 64, 512), seed=5)
LONGER = make_prompts([193, 257, 321, 417, 705, 1313], seed=6)  # a block and one token more
ANSWER = 32


class Counts(NamedTuple):
    """Tokens that were drafted, and those of them that were accepted."""

    accepted: float
    drafted: float

    def rate(self, lost: int = 0) -> float:
        """Accepted of drafted, but for the drafts of ``lost`` steps."""
        return self.accepted / (self.drafted - lost * DRAFTED)


def counts(made: Handover, decode: str | None, prompts: Sequence[Prompt] = LONGER) -> Counts:
    """Of one engine alone (None), or of a decode engine after hand-overs."""
    client = made.clients[decode or "alone"]

    def seen() -> list[float]:
        metrics, name = client.metrics(), "vllm:spec_decode_num_{}_tokens_total"
        return [metrics.get(name.format(kind), 0.0) for kind in ("accepted", "draft")]

    before = seen()
    for prompt in prompts:
        if decode is None:
            client.complete(prompt, ANSWER)
        else:
            prefill_then_decode(made.clients["prefill"], client, prompt, ANSWER)
    return Counts(*(now - was for now, was in zip(seen(), before, strict=True)))


def beside(family: Family, model: Path, prefix_caching: bool, ranks: int = 1) -> list[EngineSpec]:
    """A pair, and engines that see other bytes than were lent."""
    faults = {"reads": {"corrupt": 1.0}}
    caching = {"prefix_caching": prefix_caching}
    return [
        engine("prefill", family, model, "kv_producer", ranks=ranks, **caching),
        engine("decode", family, model, "kv_consumer", **caching),
        engine("flipped", family, model, "kv_consumer", verify="off", debug_faults=faults),
        engine(
            "flipped-draft", family, model, "kv_consumer", verify="off", connector="FlippedDraft"
        ),
    ]


def check(made: Handover, prefix_caching: bool) -> None:
    """Answers, their control, and how much of what is drafted is accepted."""
    assert made.mismatches(PROMPTS) == []
    assert made.metric("pulls_verified_total") == len(PROMPTS)
    if prefix_caching:
        assert made.mismatches(PROMPTS) == []
        assert made.metric("saved_by_hits_bytes_total") > 0
    full = make_prompts([8 * 32] * 4, seed=9)  # one more token: every byte pulled matters
    assert made.mismatches(full, decode="flipped") != []
    alone, after = counts(made, None), counts(made, "decode")
    assert alone.rate() > 0.6
    # vLLM loses the first drafts of a prompt of which it computes one token only, also of one
    # that it has itself: see test_draft_model.
    assert after.rate(lost=len(LONGER)) == pytest.approx(alone.rate(), abs=0.05)
    assert counts(made, "flipped-draft").rate() < alone.rate() / 2
    assert made.mismatches(LONGER, decode="flipped-draft") == [], "the target verifies drafts"


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "caching"])
def test_draft_model(prefix_caching: bool, tmp_path: Path) -> None:
    """A draft model with other KV heads than the target's."""
    model = write_target(tmp_path / "model")
    draft = write_draft_model(model, tmp_path / "draft")
    family = drafting(LLAMA, method="draft_model", model=str(draft))
    specs = beside(family, model, prefix_caching)
    if not prefix_caching:
        specs += [
            engine("undrafted-prefill", LLAMA, model, "kv_producer"),
            engine("undrafted", LLAMA, model, "kv_consumer"),
        ]
    with handing_over(family, tmp_path, specs, model, prefix_caching=prefix_caching) as made:
        check(made, prefix_caching)
        if prefix_caching:
            held, pulled = counts(made, None), counts(made, "decode")
            assert held == pulled, "alone as after a hand-over: all but one token is there"
        else:
            assert made.mismatches(PROMPTS[:4], decode="undrafted") == []
            with pytest.raises(RequestRefused, match="500"):
                made.mismatches(PROMPTS[-1:], "undrafted-prefill", "decode")
            log = (tmp_path / "decode.log").read_text(encoding="utf-8")
            assert "speculative_config.method: theirs nothing, ours draft_model" in log


def test_a_draft_models_heads_are_found_over_ranks(tmp_path: Path) -> None:
    """Two ranks to one, of four heads where the target has two."""
    model = write_target(tmp_path / "model")
    draft = write_draft_model(model, tmp_path / "draft")
    family = drafting(LLAMA, method="draft_model", model=str(draft))
    specs = beside(family, model, prefix_caching=False, ranks=2)
    with handing_over(family, tmp_path, specs, model) as made:
        check(made, prefix_caching=False)


@pytest.mark.parametrize("prefix_caching", [False, True], ids=["plain", "caching"])
def test_ngram(prefix_caching: bool, tmp_path: Path) -> None:
    """Drafts from the tokens of request and answer: prefill has no part in it."""
    model = write_target(tmp_path / "model")
    family = drafting(LLAMA, method="ngram", prompt_lookup_min=1, prompt_lookup_max=3)
    caching = {"prefix_caching": prefix_caching}
    specs = [
        engine("prefill", LLAMA, model, "kv_producer", **caching),
        engine("decode", family, model, "kv_consumer", **caching),
    ]
    with handing_over(family, tmp_path, specs, model, **caching) as made:
        assert made.mismatches(PROMPTS) == []
        assert made.metric("pulls_verified_total") == len(PROMPTS)
        repeated = [tuple(prompt[:40]) * 8 for prompt in LONGER]
        assert counts(made, None, repeated).accepted > 0
        assert counts(made, "decode", repeated).accepted > 0


def test_eagle(tmp_path: Path) -> None:
    model = write_target(tmp_path / "model")
    head = write_eagle(model, tmp_path / "eagle")
    family = drafting(LLAMA, method="eagle", model=str(head))
    specs = beside(family, model, prefix_caching=True)
    with handing_over(family, tmp_path, specs, model, prefix_caching=True) as made:
        check(made, prefix_caching=True)


def test_mtp(tmp_path: Path) -> None:
    model = write_mtp(tmp_path / "model")
    family = drafting(MIMO, method="mtp")
    specs = beside(family, model, prefix_caching=True)
    with handing_over(family, tmp_path, specs, model, prefix_caching=True) as made:
        check(made, prefix_caching=True)
