"""Aborts and kills amid hand-overs of states: nobody gets a wrong token, no block is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from tests.vllm.engines.families.faults import (
    LENGTHS,
    Faulty,
    abort_pulls,
    answers_amid_a_kill,
    faulty_engines,
    kill_prefill,
    wrong_after_aborts,
)
from tests.vllm.engines.families.models import GRANITE_4_H

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    work = tmp_path_factory.mktemp("granite-faults")
    with faulty_engines(GRANITE_4_H, work, prefix_caching=True, hasty=True) as faulty:
        yield faulty


def test_aborted_pulls_leave_nothing_behind(engines: Faulty) -> None:
    abort_pulls(engines, seed=21, count=2)


def test_a_killed_prefill_engine_costs_no_right_answer(engines: Faulty) -> None:
    kill_prefill(engines, seed=22, count=3)


def test_blocks_that_are_given_back_before_their_read_are_noticed(engines: Faulty) -> None:
    """Negative control of aborts."""
    prompts, others = (make_prompts(LENGTHS * 2, seed) for seed in (51, 61))
    assert wrong_after_aborts(engines.hasty, prompts, others) != []


def test_a_failed_pull_that_is_taken_for_received_is_noticed(engines: Faulty) -> None:
    """Negative control of kills, after which prefill does not run any more."""
    prompts = make_prompts(LENGTHS * 2, seed=71)
    seen = answers_amid_a_kill(engines.hasty, prompts)
    assert len(engines.made.wrong(prompts, seen)) == len(prompts)
