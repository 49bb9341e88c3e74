"""Windows kept at the ends of answers, with vLLM's own manager: the next turn hits, and rightly.

Conversations go on where an answer ended; what their prompts find is held, token by token,
against what was written, by :class:`~tests.vllm.windows.memory.SimMemory`.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.property.scale import at_least

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.core.kv_cache_manager")

    from pdconn.vllm.lends import answers as lends_answers
    from pdconn.vllm.lends.answers import LendableAnswer, answer_of
    from pdconn.vllm.patches.pool import answer_windows
    from pdconn.vllm.patches.pool.answer_windows import AnswerWindows
    from pdconn.vllm.patches.pool.kept_windows import keep_window_of_last_token
    from pdconn.vllm.patches.request_writes import num_computed
    from tests.fakes.simulated.sim_cache import CacheShape, GroupShape, SimCache
    from tests.vllm.windows.memory import Running, SimMemory

NUM_CONVERSATIONS = at_least(40)
GPT_OSS = (GroupShape(16), GroupShape(16, 128))


def shape_of(rng: Random) -> CacheShape:
    full, block = rng.choice(((16, 16), (32, 16), (64, 16), (32, 32), (16, 32)))
    groups = [GroupShape(block, rng.randint(2, 200)) for _ in range(rng.choice((1, 2)))]
    groups += [GroupShape(full)] * rng.choice((1, 1, 2))
    rng.shuffle(groups)
    return CacheShape(
        tuple(groups),
        rng.choice((60, 120, 400)),
        retention=rng.choice((0, 0, None)),
        chunk_tokens=rng.choice((64, 512)),
    )


def play(seed: int, *, keeps: bool = True) -> tuple[int, int]:
    """A few conversations; tokens that prompts of later turns have, and those that they hit."""
    rng = Random(seed)
    cache = SimCache(shape_of(rng), keeps_answers=keeps)
    memory = SimMemory(cache, their_block=rng.choice((8, 16, 1 << 30)))
    asked = hit = 0
    said = [[rng.randrange(1000) for _ in range(rng.randint(2, 500))] for _ in range(3)]
    for _ in range(10):
        at = rng.randrange(3)
        hit += cache.hit(cache.request(said[at]))
        asked += len(said[at])
        before = len(memory.running)
        if rng.random() < 0.5:
            memory.pull(said[at])
        else:
            memory.compute(said[at])
        if len(memory.running) > before:
            answer = [rng.randrange(1000) for _ in range(rng.randint(0, 150))]
            said[at] = memory.end(len(memory.running) - 1, answer)
            said[at] += [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
    memory.end_all()
    return asked, hit


def test_what_the_next_turn_finds_is_what_was_written() -> None:
    played = [play(seed) for seed in range(NUM_CONVERSATIONS)]
    without = [play(seed, keeps=False) for seed in range(NUM_CONVERSATIONS)]
    hit, hit_without = (sum(one[1] for one in each) for each in (played, without))
    assert hit > 1.3 * hit_without


def short_answers() -> None:
    """Pulls from a lender of smaller blocks, and ends within the block that the prompt ends in."""
    for length in range(400, 464):
        groups = (GroupShape(64), GroupShape(64, 150))
        memory = SimMemory(
            SimCache(CacheShape(groups, 60, retention=0), keeps_answers=True), their_block=8
        )
        memory.pull(list(range(length)))
        said = memory.end(0, [7, 8])
        memory.compute([*said, 9])
        memory.end_all()


def test_what_was_pulled_in_part_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    short_answers()
    monkeypatch.setattr(AnswerWindows, "mark_partial", lambda *_: None)
    with pytest.raises(AssertionError, match="wrong at"):
        short_answers()


def test_a_window_with_holes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: of what is kept nothing is a hole, which vLLM would skip without a word."""
    monkeypatch.setattr(answer_windows, "keep_more_tokens", lambda *_: None)
    kept = [play(seed)[1] for seed in range(NUM_CONVERSATIONS // 4)]
    monkeypatch.undo()
    assert sum(kept) < sum(play(seed)[1] for seed in range(NUM_CONVERSATIONS // 4))


def lendable(seed: int) -> int:
    """Conversations of which prompt and answer are lent back: how many can be cut."""
    rng = Random(seed)
    groups = shape_of(rng).groups
    if rng.random() < 0.3:
        groups = tuple(group for group in groups if group.window is None)
    cache = SimCache(CacheShape(groups, 120, retention=0), keeps_answers=True)
    memory, cut = SimMemory(cache), 0
    for _ in range(6):
        memory.pull([rng.randrange(1000) for _ in range(rng.randint(2, 500))])
        if not memory.running:
            continue
        answer = [rng.randrange(1000) for _ in range(rng.randint(0, 300))]
        (one,) = memory.running
        memory.answer(one, answer)
        cut += lent_of(memory, one)
        memory.end(0)
    return cut


def lent_of(memory: SimMemory, one: Running) -> int:
    """Every token that a pull up to a cut, or to the end, brings is in a block that is lent."""
    manager, computed = memory.cache.manager, one.request.num_computed_tokens
    config = manager.kv_cache_config
    blocks = manager.get_block_ids(one.request.request_id)
    answer = answer_of(manager, config, one.request, blocks, computed)
    for until in (*answer.cuts, computed):
        memory.check_blocks(one, until, answer.blocks)
    return bool(answer.cuts)


def test_every_token_up_to_a_cut_is_lent() -> None:
    assert sum(lendable(seed) for seed in range(NUM_CONVERSATIONS)) > NUM_CONVERSATIONS


@pytest.mark.parametrize("is_chunk", [True, False])
@pytest.mark.parametrize("num_drafts", [3, 6])
def test_an_answer_whose_window_has_moved_on_is_not_lent(is_chunk: bool, num_drafts: int) -> None:
    """Behind drafts that were accepted, but for the end of the answer; groups keep one more."""
    last = GroupShape(16, 64, is_chunk=True) if is_chunk else GroupShape(16, 15)
    shape = CacheShape((GroupShape(16), last) if is_chunk else (last,), 100, retention=0)
    cache = SimCache(shape, keeps_answers=True)
    manager = cache.manager
    keep_window_of_last_token(manager)
    request = cache.request(list(range(58)), max_tokens=50)
    assert cache.admit(request) == 0
    request.append_output_token_ids(7)
    cache.begin_step()
    assert manager.allocate_slots(request, 1 + num_drafts) is not None
    settled = 59 + num_drafts
    manager.remove_skipped_blocks(request.request_id, settled)
    request.num_computed_tokens = settled
    request.append_output_token_ids(8)
    blocks = manager.get_block_ids(request.request_id)
    answer = answer_of(manager, manager.kv_cache_config, request, blocks, num_computed(request))
    assert any(map(any, answer.blocks)) == (num_drafts == 3)
    cache.finish(request)


def test_a_careless_cut_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: where full attention alone has everything."""
    right = lends_answers.answer_of

    def careless(*asked: Any) -> LendableAnswer:
        found = right(*asked)
        return replace(found, cuts=tuple(range(16, found.num_tokens, 16)))

    monkeypatch.setitem(globals(), "answer_of", careless)
    with pytest.raises(AssertionError, match="a hole at"):
        list(map(lendable, range(NUM_CONVERSATIONS)))


@pytest.mark.parametrize("length", range(400, 434))
@pytest.mark.parametrize("block", [16, 32])
def test_the_next_turn_finds_the_whole_answer(length: int, block: int) -> None:
    """Up to the last block that is full, wherever the answer ends; without it nothing of it."""
    expected = length // block * block
    hits = []
    for keeps in (True, False):
        shape = CacheShape((GroupShape(block), GroupShape(block, 128)), 100, retention=0)
        cache = SimCache(shape, keeps_answers=keeps)
        memory = SimMemory(cache)
        memory.pull(list(range(200)))
        said = memory.end(0, list(range(1000, 1000 + length - 200)))
        assert len(said) == length
        hits.append(cache.hit(cache.request([*said, 7, 8])))
    assert hits[0] == expected
    assert hits[1] < 200


@pytest.mark.parametrize("in_flight", [0, 4])
@pytest.mark.parametrize("length", range(240, 258))
def test_an_answer_may_end_within_accepted_drafts(length: int, in_flight: int) -> None:
    """vLLM counts the drafts behind its end as computed; the request never got those tokens."""
    cache = SimCache(CacheShape(GPT_OSS, 100, retention=0), keeps_answers=True)
    request = cache.request(list(range(length)), max_tokens=50)
    assert cache.admit(request) == 0
    request.append_output_token_ids(7)
    for _ in range(2 if in_flight else 1):
        cache.begin_step()
        assert cache.manager.allocate_slots(request, 4, num_lookahead_tokens=3) is not None
        request.num_computed_tokens += 4
    request.num_in_flight_tokens = in_flight
    request.append_output_token_ids(8)  # the first of four; the others are behind the end
    said = list(request.all_token_ids)
    cache.finish(request)
    # Full attention is cached as the step began, with one token less.
    assert cache.hit(cache.request([*said, 9])) == (len(said) - 1) // 16 * 16
    cache.end_copies()
    assert cache.manager.block_pool.get_num_free_blocks() == cache.shape.num_blocks - 1


def test_evicted_like_others_and_nothing_is_left_pinned() -> None:
    cache = SimCache(CacheShape(GPT_OSS, 60, retention=0), keeps_answers=True)
    memory = SimMemory(cache)
    memory.pull(list(range(100)))
    said = memory.end(0, list(range(1000, 1100)))
    assert cache.hit(cache.request([*said, 1])) == 192
    for begin in (5000, 6000, 7000):
        memory.compute(list(range(begin, begin + 400)))
        memory.end_all()
    assert cache.hit(cache.request([*said, 1])) == 0


def test_the_end_is_told_to_the_router() -> None:
    """Its blocks are in the events, which say what is cached."""
    cache = SimCache(CacheShape(GPT_OSS, 100, retention=0), keeps_answers=True)
    memory = SimMemory(cache)
    memory.pull(list(range(200)))
    cache.take_batch(0.0)
    memory.end(0, list(range(1000, 1100)))
    batch: Any = cache.take_batch(0.0)
    stored = [event for event in batch.events if getattr(event, "group_idx", None) == 1]
    kept_by_vllm, kept = range(192 - 128, 192), range(288 - 128, 288)
    new = set(kept) - set(kept_by_vllm)
    assert sum(len(event.block_hashes) for event in stored) == len(new) // 16


@pytest.mark.parametrize(
    "groups",
    [
        (GroupShape(16),),
        (GroupShape(16), GroupShape(16, 64, is_chunk=True)),
        (GroupShape(16), GroupShape(64, is_state=True)),
        (GroupShape(16), GroupShape(16, 128, eagle=True)),
    ],
    ids=["no window", "chunks", "states", "drafter"],
)
def test_other_caches_are_left_alone(groups: tuple[GroupShape, ...]) -> None:
    cache = SimCache(CacheShape(groups, 100, retention=0))
    managers = cache.manager.coordinator.single_type_managers
    before = [dict(vars(one)) for one in managers]
    assert AnswerWindows.from_manager(cache.manager, 1) is None
    assert [dict(vars(one)) for one in managers] == before


@pytest.mark.parametrize("num_windows", [1, 5])
def test_the_longest_prompt_is_admitted_in_as_many_blocks_as_vllm_takes_for_it(
    num_windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one block more, for the null block; what is never admitted holds up all others."""
    groups = (GroupShape(16), *(GroupShape(16, 128),) * num_windows)
    enough = 1 + 4096 // 16 + num_windows * (-(-(127 + 512) // 16) + 1)
    kept = []
    for num_blocks in range(enough, enough + 2 * num_windows + 1):
        shape = CacheShape(groups, num_blocks, retention=0, chunk_tokens=512, longest=4096)
        cache = SimCache(shape, keeps_answers=True)
        assert cache.admit(cache.request(list(range(4095)))) is not None
        kept.append(cache.answers is not None)
    assert kept == [False] * 2 * num_windows + [True]
    monkeypatch.setattr(answer_windows, "has_room_to_keep", lambda *_: True)
    shape = CacheShape(groups, enough, retention=0, chunk_tokens=512)
    cache = SimCache(shape, keeps_answers=True)
    assert cache.admit(cache.request(list(range(4095)))) is None, "the control"


def test_a_failed_request_keeps_nothing() -> None:
    cache = SimCache(CacheShape(GPT_OSS, 100, retention=0), keeps_answers=True)
    request = cache.request(list(range(200)))
    assert cache.admit(request) is not None
    assert cache.answers is not None
    cache.answers.mark_partial(request.request_id, {0: 1})
    cache.answers.keep_answer(request, 0)
    assert not cache.answers._partial
    cache.finish(request)
