"""Threads started off the model's core may run elsewhere, and the starter goes back."""

from __future__ import annotations

import os
import threading

import pytest

from pdconn.sidechannel.affinity import spare_cores, wider_affinity, wider_cores


def test_only_a_thread_bound_to_one_core_is_let_loose() -> None:
    assert wider_cores({1}, {0, 1, 2}) == {0, 1, 2}
    assert wider_cores({1}, {0}) == {0, 1}
    assert wider_cores({1, 2}, {0, 1, 2, 3}) == {1, 2}


def test_threads_inherit_the_wider_choice_and_the_starter_goes_back() -> None:
    bound = {min(os.sched_getaffinity(0))}
    seen: list[set[int]] = []

    def worker() -> None:
        os.sched_setaffinity(0, bound)
        with wider_affinity():
            started = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            started.start()
            started.join()
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=worker)
    thread.start()
    thread.join()
    assert seen == [bound | os.sched_getaffinity(os.getppid()), bound]


@pytest.mark.parametrize(
    ("own", "parent", "model", "threads", "spare"),
    [
        ({1}, {0, 1}, {1}, 1, frozenset({0})),
        ({0}, {0, 1}, {0, 1}, 2, frozenset()),  # two ranks, a core each
        ({1}, {1}, {1}, 1, frozenset()),
        ({0, 1}, {0, 1}, None, 1, None),
        ({0, 1}, {0, 1}, None, 2, frozenset()),
    ],
)
def test_no_core_of_the_model_is_spare(
    own: set[int],
    parent: set[int],
    model: set[int] | None,
    threads: int,
    spare: frozenset[int] | None,
) -> None:
    assert spare_cores(own, parent, model, threads) == spare
