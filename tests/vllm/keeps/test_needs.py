"""What requests lack after a step, and when promises give it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.keeps.needs import WAITS_S, BlockNeeds
    from tests.fakes.simulated.requests import vllm_request
    from tests.vllm.patches.vllm_scheduler import cache_config


def needs(free: int) -> BlockNeeds:
    """Of an engine with one group of blocks of 16 tokens."""
    [group] = cache_config().kv_cache_groups
    one = SimpleNamespace(
        block_size=16, max_admission_blocks_per_request=None, kv_cache_spec=group.kv_cache_spec
    )
    made = BlockNeeds()
    made.manager = SimpleNamespace(
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: free),
        coordinator=SimpleNamespace(single_type_managers=[one]),
    )
    return made


def request(name: str, num_tokens: int, num_computed: int = 0) -> Any:
    return vllm_request(request_id=name, num_tokens=num_tokens, num_computed_tokens=num_computed)


def lacking(
    made: BlockNeeds, counts: dict[str, int], *, now: float = 0.0, kept: int = 100, own: int = 0
) -> int:
    return made.take_lacking(counts, now, kept, lambda name: own)


@pytest.mark.parametrize(
    ("num_tokens", "own", "kept", "lacks"),
    [
        (160, 0, 100, 6),  # ten blocks, four of them free
        (160, 3, 100, 3),  # it hits what is kept for its own session
        (64, 0, 100, 0),  # it has enough: it waits for something else
        (1600, 0, 100, 96),
        (1760, 0, 100, 0),  # more than promises can give, and others run
    ],
)
def test_a_request_that_was_not_admitted_lacks_its_whole_sequence(
    num_tokens: int, own: int, kept: int, lacks: int
) -> None:
    made = needs(free=4)
    made.note_asked(request("r", num_tokens))
    assert max(0, lacking(made, {"other": 1}, own=own, kept=kept)) == lacks


def test_one_that_is_admitted_lacks_nothing() -> None:
    made = needs(free=4)
    made.note_asked(request("r", 160))
    made.note_admitted(request("r", 160))
    assert lacking(made, {"other": 1}) <= 0
    made.note_finished("r")
    assert len(made) == 0


def test_where_nothing_runs_a_promise_is_broken_whatever_the_count_says() -> None:
    for num_tokens, lacks in ((16, 1), (160, 6), (16_000, 996)):
        made = needs(free=4)
        made.note_asked(request("r", num_tokens))
        assert lacking(made, {}) == lacks


def test_one_that_waits_for_long_though_it_should_not_breaks_one_promise_a_time() -> None:
    """As where vLLM reserves blocks for loads."""
    made = needs(free=40)
    broken = []
    for step in range(30):
        made.note_asked(request("r", 160))
        broken.append(max(0, lacking(made, {"other": 1}, now=step * WAITS_S / 10)))
    assert sum(broken) == 2
    assert broken[10] == broken[20] == 1


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "count", "lacks"),
    [
        (1600, 320, 320, 20),  # as many tokens of its prompt again
        (700, 320, 320, 4),  # the rest of its prompt: 60 tokens
        (640, 320, 320, 1),  # it has its prompt: a token, at the edge of a block
        (650, 640, 1, 0),  # a token within a block
        (657, 655, 1, 1),  # a token behind a block
    ],
)
def test_a_running_request_grows_by_a_step(
    num_tokens: int, num_computed: int, count: int, lacks: int
) -> None:
    made = needs(free=0)
    made.note_admitted(request("r", num_tokens, num_computed))
    assert lacking(made, {"r": count}) == lacks
