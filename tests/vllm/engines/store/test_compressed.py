"""A store with compressed rows behind real engines: bfloat16 KV comes back to the bit.

Engines in bfloat16 answer alike only if they compute alike, so two of them are asked in the same
order, one with compressed rows and one without: what both loaded, they go on from alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdconn.store.format.footer import decode_footer
from pdconn.tools.lab.compare_answers import distance
from pdconn.tools.lab.lab_client import Client
from tests.forked.engines import running
from tests.vllm.engines.engines import cache_beside
from tests.vllm.engines.store.stores import (
    TOKENS,
    asked,
    hit_tokens,
    num_rows,
    prompts,
    resumable,
    rows,
    store_engine,
    wait_for_rows,
)

pytestmark = pytest.mark.matrix  # two engines of their own

LENGTHS = (TOKENS + 1, 3 * TOKENS, 700, 1500)


@dataclass(frozen=True)
class Stored:
    """An engine and the root of its store."""

    client: Client
    root: Path


@pytest.fixture(scope="module")
def stores(model: Path, work: Path) -> Iterator[dict[str, Stored]]:
    """Engines in bfloat16, by the compression of their rows."""
    roots = {name: work / f"rows-{name}" for name in ("none", "exponents")}
    specs = [
        replace(
            store_engine(f"rows-{name}", model, root, compression=name),
            args=("--dtype", "bfloat16"),
        )
        for name, root in roots.items()
    ]
    with running(specs, work / "compressed-engines", cache=cache_beside(model)) as engines:
        yield {
            name: Stored(Client(engine.url), roots[name])
            for name, engine in zip(roots, engines, strict=True)
        }


def test_compressed_rows_are_loaded_smaller_and_answered_as_plain_ones(
    stores: dict[str, Stored],
) -> None:
    wanted = prompts(53, LENGTHS)
    answers, nbytes = {}, {}
    for name, store in stores.items():
        asked(store.client, wanted)
        assert hit_tokens(store.client) == 0
        wait_for_rows(store.root, num_rows(wanted))
        answers[name] = asked(store.client, wanted)
        assert hit_tokens(store.client) == sum(map(resumable, wanted))
        assert store.client.metrics().get("pdconn:store_rows_damaged_total", 0) == 0
        files = rows(store.root, "fa")
        nbytes[name] = sum(path.stat().st_size for path in files)
        assert {decode_footer(path.read_bytes()).is_packed for path in files} == {
            name == "exponents"
        }
    for prompt in wanted:
        assert distance(answers["none"][prompt], answers["exponents"][prompt]) == 0
    spilled = stores["exponents"].client.metrics().get("pdconn:store_heads_spilled_total", 0)
    assert spilled == 0
    assert nbytes["exponents"] < nbytes["none"]
