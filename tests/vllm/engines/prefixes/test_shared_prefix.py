"""Prompts that share a prefix, of windows and full attention: decode pulls what it lacks alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.lab_client import Client, prefill_only
from tests.vllm.engines.families.handover import Handover, Prompt, engine, handing_over
from tests.vllm.engines.families.models import GEMMA_4, GPT_OSS, Family

pytestmark = pytest.mark.matrix

BLOCK = 32
SHARED, FIRST, SECOND = 3200, 4004, 4199
"""Tokens shared, and tokens pulled of either prompt, which is one longer."""
MOST_BYTES = {"gpt_oss": 0.3, "gemma4": 0.4}
"""Bytes of the second pull, of those of an engine that holds nothing.  Five of Gemma's six layers
have windows, and they more heads, which are pulled in any case."""


@pytest.fixture(scope="module", params=[GPT_OSS, GEMMA_4], ids=lambda family: family.name)
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Handover]:
    """Two prefill engines, a decode engine, and one that takes windows for held."""
    family: Family = request.param
    work = tmp_path_factory.mktemp(family.name)
    model = family.write(work / "model")
    longer = {"max_model_len": 4608}
    decode = longer | {"prefix_caching": True}
    specs = [
        engine("prefill", family, model, "kv_producer", **longer),
        engine("other", family, model, "kv_producer", **longer),
        engine("decode", family, model, "kv_consumer", **decode),
        engine("careless", family, model, "kv_consumer", connector="HeldByAll", **decode),
    ]
    with handing_over(family, work, specs, model) as made:
        yield made


def sharing(shared: int, lengths: Sequence[int], seed: int) -> list[Prompt]:
    """Prompts of ``lengths`` tokens, of which the first ``shared`` are the same."""
    stem, *tails = make_prompts([shared, *(length - shared for length in lengths)], seed)
    return [stem + tail for tail in tails]


def pulled(made: Handover) -> tuple[float, float]:
    """Bytes of full attention and of windows."""
    full, window = "full_attention_bytes_total", "window_bytes_total"
    return made.metric(full), made.metric(window)


def test_the_second_prompt_brings_what_is_not_shared(engines: Handover) -> None:
    first, second = sharing(SHARED, (FIRST, SECOND), seed=5)
    before = pulled(engines)
    assert engines.mismatches([first]) == []
    between = pulled(engines)
    assert engines.mismatches([second], prefill="other") == []
    after = pulled(engines)
    full = [between[0] - before[0], after[0] - between[0]]
    windows = [between[1] - before[1], after[1] - between[1]]
    blocks = [-(-tokens // BLOCK) for tokens in (FIRST, SECOND)]
    assert blocks == [126, 132]
    assert full[1] * blocks[0] == full[0] * (blocks[1] - SHARED // BLOCK)  # 32 of 132
    whole = full[0] / blocks[0] * blocks[1] + windows[1]
    print(f"{engines.family.name}: {(full[1] + windows[1]) / whole:.3f} of the bytes")
    assert full[1] + windows[1] <= MOST_BYTES[engines.family.name] * whole
    assert engines.metric("pulls_verified_total") == engines.metric("pulls_total")


def test_answers_are_right_wherever_prompts_part(engines: Handover) -> None:
    window = engines.family.edges[0]
    edges = {size * BLOCK + step for size in (1, 2, 8) for step in (-1, 0, 1)} | {3 * window}
    for seed, shared in enumerate(sorted(edges)):
        prompts = sharing(shared, (shared + 300, shared + 1, shared + 40, 700), seed=20 + seed)
        assert engines.mismatches(prompts) == [], shared
    assert engines.metric("pulls_verified_total") == engines.metric("pulls_total")


def test_an_engine_that_takes_windows_for_held_is_wrong(engines: Handover) -> None:
    """Negative control."""
    prompts = sharing(640, (900, 670, 680), seed=50)
    assert engines.mismatches(prompts[:1], decode="careless") == []
    assert len(engines.mismatches(prompts[1:], decode="careless")) == 2


def most_used(made: Handover, prompts: Sequence[Prompt]) -> float:
    """The largest part of decode's blocks in use while it answers all of ``prompts`` at once.

    They are lent before, since answers to prompts that are still computed need not overlap.
    """
    decode, prefill = made.clients["decode"], made.clients["prefill"]
    tickets = [prefill_only(prefill, prompt) for prompt in prompts]
    seen, is_over = [0.0], threading.Event()

    def watch() -> None:
        watched = Client(decode.url)
        while not is_over.is_set():
            seen.append(watched.metrics()["vllm:kv_cache_usage_perc"])

    def ask(prompt: Prompt, ticket: Any) -> None:
        decode.complete(prompt, 100, kv_transfer_params=ticket)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(ask, prompts, tickets))
    is_over.set()
    watcher.join()
    return max(seen)


def test_blocks_that_are_shared_are_there_once(engines: Handover) -> None:
    first, *others = sharing(SHARED, (FIRST,) * 4, seed=60)
    assert engines.mismatches([first]) == []
    shared = most_used(engines, others)
    unshared = most_used(engines, make_prompts((FIRST,) * 3, seed=61))
    # Each has 126 blocks of full attention, of which 100 are shared, and a few of windows.
    assert shared < 0.7 * unshared
