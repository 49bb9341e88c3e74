"""Families whose decode engine has a part of a prompt in its store: it pulls the rest of it.

Windows and states are pulled whole: of those a part is of no use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from tests.vllm.engines.families.handover import Handover, engine, handing_over
from tests.vllm.engines.families.models import GEMMA_4, GPT_OSS, GRANITE_4_H, Family
from tests.vllm.engines.store.stores import rows, wait_for_rows

pytestmark = pytest.mark.matrix

ROWS = {"gpt_oss": 128, "gemma4": 128, "granite4h": 64}
"""Tokens of a row."""
PULLED = ("full_attention_bytes_total", "window_bytes_total", "state_bytes_total")
SHARES = (0.25, 0.5, 0.9)


@contextmanager
def parts(family: Family, work: Path, ranks: int) -> Iterator[tuple[Handover, Path]]:
    """``saves`` fills the store of which ``decode`` loads what ``prefill`` need not lend."""
    model, root = family.write(work / "model"), work / "store"
    store = {
        "root": str(root), "capacity": "1GiB", "staging": "256MiB", "min_tokens": 1,
        "block_tokens": ROWS[family.name], "window_every": "last", "beside": "always",
    }  # fmt: skip
    # States are kept at the ends of rows with prefix caching alone.
    more = {"store": store, "prefix_caching": family is GRANITE_4_H}
    specs = [
        engine("prefill", family, model, "kv_producer"),
        engine("saves", family, model, "kv_consumer", **more),
        engine("decode", family, model, "kv_consumer", ranks=ranks, **more),
    ]
    with handing_over(family, work, specs, model) as made:
        yield made, root


def pulled(made: Handover, prompt: tuple[int, ...]) -> list[float]:
    """Bytes of each kind that decode pulls to answer rightly."""
    before = [made.metric(name) for name in PULLED]
    assert made.mismatches([prompt]) == []
    return [made.metric(name) - seen for name, seen in zip(PULLED, before, strict=True)]


@pytest.mark.parametrize(
    ("family", "ranks"),
    [(GPT_OSS, 1), (GEMMA_4, 2), (GRANITE_4_H, 1)],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_bytes_pulled_fall_by_what_is_stored(family: Family, ranks: int, tmp_path: Path) -> None:
    size = ROWS[family.name]
    length = 12 * size + 20
    whole, *wanted = make_prompts([length] * (1 + len(SHARES)), seed=31)
    with parts(family, tmp_path, ranks) as (made, root):
        alone = pulled(made, whole)
        assert alone[0] > 0
        row = alone[0] / length * size
        for share, prompt in zip(SHARES, wanted, strict=True):
            count, saved = int(share * length) // size, len(rows(root, "fa"))
            made.clients["saves"].complete(prompt[: count * size + 1], 1)
            wait_for_rows(root, saved + count)
            seen = pulled(made, prompt)
            assert alone[0] - seen[0] == pytest.approx(count * row, abs=row)
            assert seen[1:] == alone[1:]
        assert made.metric("store_beside_total") == len(SHARES)
        assert made.metric("store_beside_missed_tokens_total") == 0
