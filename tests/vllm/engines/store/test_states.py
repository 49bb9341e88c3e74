"""Stores of attention and states: real engines, of which one resumes where another computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pdconn.store.format.footer import decode_footer
from pdconn.tools.lab.compare_answers import Mismatch, compare, make_prompts
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import cache_beside
from tests.vllm.engines.families.handover import NUM_TOKENS, Prompt, engine
from tests.vllm.engines.families.models import GRANITE_4_H
from tests.vllm.engines.store.stores import hit_tokens, rows, wait_for_rows

pytestmark = pytest.mark.matrix

TOKENS = 64
"""Of a block, which holds as many bytes as a state, and of a row."""
PROMPTS = make_prompts([40, TOKENS, TOKENS + 1, 3 * TOKENS - 1, 3 * TOKENS, 500, 1500], seed=6)


@dataclass
class Stores:
    """Engines by name: one alone, and some over one root; and how to make more of these."""

    engines: dict[str, Engine]
    model: Path
    work: Path

    @property
    def root(self) -> Path:
        return self.work / "store"

    def __getitem__(self, name: str) -> Client:
        return Client(self.engines[name].url)

    def mismatches(self, name: str, wanted: Sequence[Prompt]) -> list[tuple[int, Mismatch]]:
        """How answers differ from those of the engine alone, by the prompt's tokens."""
        found = []
        for prompt in wanted:
            alone, seen = (self[one].complete(prompt, NUM_TOKENS) for one in ("alone", name))
            if (difference := compare(alone, seen)) is not None:
                found.append((len(prompt), difference))
        return found


def stored(
    name: str, model: Path, root: Path, *, ranks: int = 1, connector: str | None = None
) -> EngineSpec:
    """An engine with a store, and vLLM's default failure policy."""
    store = {
        "root": str(root), "capacity": "1GiB", "staging": "256MiB", "block_tokens": TOKENS,
        "min_tokens": 1, "window_every": "all",
    }  # fmt: skip
    return engine(
        name, GRANITE_4_H, model, "kv_consumer", ranks=ranks, prefix_caching=True,
        connector=connector, store=store,
    )  # fmt: skip


def resumable(prompts: Sequence[Prompt]) -> int:
    """Tokens of prompts that were saved whole which their next runs load."""
    return sum((len(prompt) - 1) // TOKENS * TOKENS for prompt in prompts)


def flip_a_bit(row: Path) -> None:
    """Of the number, all being float32, that grows most by a flipped bit of its exponent."""
    data = bytearray(row.read_bytes())
    numbers = np.frombuffer(data, dtype="<u4", count=decode_footer(data).data_nbytes // 4)
    flipped = numbers ^ np.uint32(1 << 26)
    at = int(np.argmax(np.abs(flipped.view("<f4"))))
    data[4 * at : 4 * at + 4] = flipped[at].tobytes()
    row.write_bytes(data)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """``cold`` has computed :data:`PROMPTS`, and its rows are committed."""
    work = tmp_path_factory.mktemp("stores")
    model = GRANITE_4_H.write(work / "model")
    root = work / "store"
    specs = [
        engine("alone", GRANITE_4_H, model, None, prefix_caching=True),
        stored("cold", model, root),
        stored("warm", model, root),
        stored("wide", model, root, ranks=2),
    ]
    with running(specs, work, cache=cache_beside(model)) as started:
        made = Stores({each.spec.name: each for each in started}, model, work)
        assert made.mismatches("cold", PROMPTS) == []
        assert hit_tokens(made["cold"]) == 0
        wait_for_rows(root, sum(len(prompt) // TOKENS for prompt in PROMPTS))
        yield made


@pytest.mark.parametrize("name", ["warm", "wide"])
def test_another_engine_resumes_at_the_last_boundary(stores: Stores, name: str) -> None:
    before = hit_tokens(stores[name])
    assert stores.mismatches(name, PROMPTS) == []
    assert hit_tokens(stores[name]) - before == resumable(PROMPTS)


def test_a_longer_prompt_resumes_where_the_shorter_one_ended(stores: Stores) -> None:
    short, tail = make_prompts([3 * TOKENS, 150], seed=7)
    saved = len(rows(stores.root, "fa"))
    assert stores.mismatches("cold", [short]) == []
    wait_for_rows(stores.root, saved + 3)
    before = hit_tokens(stores["warm"])
    assert stores.mismatches("warm", [short + tail]) == []
    assert hit_tokens(stores["warm"]) - before == 3 * TOKENS


def test_one_rank_resumes_what_two_computed(stores: Stores) -> None:
    prompts = make_prompts([2 * TOKENS, 400], seed=8)
    saved = len(rows(stores.root, "fa"))
    assert stores.mismatches("wide", prompts) == []
    wait_for_rows(stores.root, saved + sum(len(prompt) // TOKENS for prompt in prompts))
    before = hit_tokens(stores["warm"])
    assert stores.mismatches("warm", prompts) == []
    assert hit_tokens(stores["warm"]) - before == resumable(prompts)


def test_an_engine_started_later_resumes_and_a_flipped_bit_is_not_taken(stores: Stores) -> None:
    """Negative control: an engine that does not look at checksums answers wrongly."""
    prompts = PROMPTS[4:]
    with running(
        [stored("later", stores.model, stores.root)], stores.work / "later",
        cache=cache_beside(stores.model),
    ) as [later]:  # fmt: skip
        stores.engines["later"] = later
        assert stores.mismatches("later", prompts) == []
        assert hit_tokens(stores["later"]) == resumable(prompts)
    for path in rows(stores.root, "wa"):
        flip_a_bit(path)
    specs = [
        stored("trusting", stores.model, stores.root, connector="TrustingStore"),
        stored("careful", stores.model, stores.root),
    ]
    with running(specs, stores.work / "flipped", cache=cache_beside(stores.model)) as started:
        stores.engines |= {each.spec.name: each for each in started}
        assert stores.mismatches("trusting", prompts)
        assert hit_tokens(stores["trusting"]) == resumable(prompts)
        assert stores.mismatches("careful", prompts) == []
        assert hit_tokens(stores["careful"]) == 0
