"""What vLLM bound the model to is not taken by our threads."""

from __future__ import annotations

import pytest

from pdconn.vllm.memory.cores import bound_cores

BIND = "VLLM_CPU_OMP_THREADS_BIND"


@pytest.mark.parametrize(
    ("own", "ranks", "bind", "bound"),
    [
        ({0, 1, 2, 3}, 1, "nobind", None),
        ({0, 1, 2, 3}, 2, "nobind", None),
        ({2, 3}, 1, "auto", {2, 3}),
        ({2}, 2, "2|3", {2, 3}),
        ({0, 1}, 2, "0-1|3", {0, 1, 3}),
        ({2}, 2, "auto", {0, 1, 2, 3}),  # where the other rank is, is not known
        ({2}, 2, "", {0, 1, 2, 3}),
    ],
)
def test_cores_of_all_ranks_are_known_or_all_are_taken(
    own: set[int], ranks: int, bind: str, bound: set[int] | None
) -> None:
    assert bound_cores(own, {0, 1, 2, 3}, ranks, {BIND: bind}) == bound
