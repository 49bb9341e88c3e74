"""What the index takes for held: exactly what an engine has not removed since."""

from __future__ import annotations

from pdconn.router.prefix.index import Index
from tests.fakes.fake_engine import in_loop
from tests.fakes.routed import ASKED, PROMPT, fleet


def test_a_block_that_is_stored_twice_is_gone_with_one_removal() -> None:
    """vLLM's ``full`` report mode repeats what is held; a client can ask an engine for it."""
    index = Index()
    index.store("a", 0, "gpu", [1, 2])
    index.store("a", 0, "gpu", [1, 2])
    assert index.pods["a"].num_blocks == 2
    index.remove("a", 0, "gpu", [1])
    assert index.held_by("a", [1, 2]) == {(0, "gpu"): [2]}
    index.remove("a", 0, "gpu", [1])  # the other copy, if there was one
    assert index.pods["a"].unknown_removals == 1
    index.remove("a", 0, "gpu", [2])
    assert (index.num_hashes, list(index.planes())) == (0, [])


@in_loop
async def test_what_an_engine_repeats_is_not_predicted_once_it_is_gone() -> None:
    """Else a prompt is drawn to an engine that computes all of it: predicted 320, true 0."""
    async with fleet() as f:
        pod = f.pod(f.prefill[0])
        await pod.store(PROMPT)
        await pod.store(PROMPT)
        await f.events_applied()
        assert (await f.ask(ASKED)).hit_tokens(f.prefill[0].url) == 320
        await pod.remove(PROMPT)
        await f.events_applied()
        assert (await f.ask(ASKED)).hit_tokens(f.prefill[0].url) == 0
