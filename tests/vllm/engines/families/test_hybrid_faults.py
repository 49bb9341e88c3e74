"""Aborts and kills amid hand-overs of states: nobody gets a wrong token, no block is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.vllm.engines.families.faults import Faulty, abort_pulls, faulty_engines, kill_prefill
from tests.vllm.engines.families.models import GRANITE_4_H

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    work = tmp_path_factory.mktemp("granite-faults")
    with faulty_engines(GRANITE_4_H, work, prefix_caching=True) as faulty:
        yield faulty


def test_aborted_pulls_leave_nothing_behind(engines: Faulty) -> None:
    abort_pulls(engines, seed=21, count=2)


def test_a_killed_prefill_engine_costs_no_right_answer(engines: Faulty) -> None:
    kill_prefill(engines, seed=22, count=3)
