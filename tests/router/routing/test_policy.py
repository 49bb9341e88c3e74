"""Laws of the policies, which are pure: candidates in, an order out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.router.prefix.score import NO_HIT, Hit
from pdconn.router.routing.policy import (
    POLICIES,
    PRESSURE_FROM_USAGE,
    PRESSURE_PROMPTS,
    TIE_TOKENS,
    TOKENS_PER_DECODE_REQUEST,
    TOKENS_PER_PULLED_TOKEN,
    Candidate,
    Policy,
    PrefixAware,
    Random,
    Ranking,
    RoundRobin,
    RouteQuery,
)

NAMES = [f"http://10.0.0.{i}:8000" for i in range(6)]
LONG = RouteQuery(8192, b"a beginning")


def hit(tokens: int) -> Hit:
    return Hit(tokens // 16, tokens, tokens / 16)


def names(decision: Ranking) -> tuple[list[str], list[str]]:
    prefill, decode = decision.prefill, decision.decode
    return [one.candidate.engine for one in prefill], [one.candidate.engine for one in decode]


def first(question: RouteQuery, *candidates: Candidate, decode: bool = False) -> str:
    """The candidate that is asked first, as prefill or as decode."""
    if decode:
        prefill = [Candidate("p")]
        return PrefixAware().decide(question, prefill, candidates).decode[0].candidate.engine
    return PrefixAware().decide(question, candidates, []).prefill[0].candidate.engine


candidates = st.lists(
    st.builds(
        Candidate,
        engine=st.sampled_from(NAMES),
        hit=st.integers(0, 600).map(lambda blocks: hit(16 * blocks)),
        rank=st.none() | st.integers(0, 3),
        queued_tokens=st.integers(0, 20_000),
        num_requests=st.integers(0, 300),
        kv_usage=st.floats(0, 1),
    ),
    max_size=6,
    unique_by=lambda one: one.engine,
)
questions = st.builds(
    RouteQuery, st.integers(0, 10_000), st.binary(max_size=300), can_hand_over=st.booleans()
)
policies = st.sampled_from(sorted(POLICIES)).map(lambda name: POLICIES[name]())


@given(policies, questions, candidates, candidates)
def test_every_candidate_is_listed_exactly_once(
    policy: Policy, question: RouteQuery, prefill: list[Candidate], decode: list[Candidate]
) -> None:
    decision = policy.decide(question, prefill, decode)
    listed = [one.candidate for one in decision.prefill]
    assert Counter(one.candidate for one in decision.decode) == Counter(decode)
    assert Counter(listed) == Counter(prefill if question.can_hand_over else ())


@given(policies, questions, candidates, candidates)
def test_what_decode_has_to_serve_alone_is_offered_to_no_prefill(
    policy: Policy, question: RouteQuery, prefill: list[Candidate], decode: list[Candidate]
) -> None:
    decision = policy.decide(replace(question, can_hand_over=False), prefill, decode)
    assert decision.alone
    assert decision.prefill == ()


@given(questions, candidates, candidates, st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_that_of_the_candidates(
    question: RouteQuery,
    prefill: list[Candidate],
    decode: list[Candidate],
    rng: random.Random,
) -> None:
    decision = PrefixAware().decide(question, prefill, decode)
    mixed = [rng.sample(role, len(role)) for role in (prefill, decode)]
    assert PrefixAware().decide(question, *mixed) == decision


def test_in_turn_the_order_of_the_candidates_does_count() -> None:
    """The control for the test above."""
    two = [Candidate(name) for name in NAMES[:2]]
    forth = RoundRobin().decide(LONG, two, two)
    assert RoundRobin().decide(LONG, two[::-1], two) != forth


@given(questions, candidates)
def test_no_engine_is_asked_before_one_that_is_cheaper_by_a_tie(
    question: RouteQuery, prefill: list[Candidate]
) -> None:
    ordered = PrefixAware().decide(replace(question, can_hand_over=True), prefill, []).prefill
    for place, one in enumerate(ordered):
        assert all(one.cost < later.cost + TIE_TOKENS for later in ordered[place:])


@given(st.integers(0, 511), st.integers(0, 511), st.booleans())
def test_a_longer_hit_wins_where_all_else_is_equal(one: int, other: int, decode: bool) -> None:
    held = [16 * one, 16 * other]
    handed = max(held) == 0 or LONG.num_tokens - max(held) > PrefixAware().alone_below
    saved = abs(held[0] - held[1]) * (TOKENS_PER_PULLED_TOKEN if decode and handed else 1)
    if saved < TIE_TOKENS:
        return
    two = [
        Candidate(name, hit(n), queued_tokens=500, num_requests=2)
        for name, n in zip(NAMES, held, strict=False)
    ]
    assert first(LONG, *two, decode=decode) == NAMES[held.index(max(held))]


def test_queued_tokens_beat_a_hit_exactly_where_the_formula_says() -> None:
    """8192 tokens; A holds 4096, so costs 4096 + queue; B costs 8192: they tie within 64."""
    b = Candidate("b")
    for queue in (0, 4096 - 64):
        assert first(LONG, Candidate("a", hit(4096), queued_tokens=queue), b) == "a"
    for queue in (4096 + 64, 100_000):
        assert first(LONG, Candidate("a", hit(4096), queued_tokens=queue), b) == "b"
    (_, dearer) = PrefixAware().decide(LONG, [Candidate("a", hit(4096)), b], []).prefill
    assert (dearer.cost, dearer.why) == (
        8192,
        "8192 uncached + 0 queued + 0 of others + 0 pressure",
    )


def test_a_full_batch_beats_decodes_hit_exactly_where_the_formula_says() -> None:
    """A need not pull 4096 of 8192, an eighth of computing them; a request costs 64 tokens."""
    b = Candidate("b")
    for requests in (0, 7):
        busy = Candidate("a", hit(4096), num_requests=requests)
        assert first(LONG, busy, b, decode=True) == "a"
    for requests in (9, 1000):
        busy = Candidate("a", hit(4096), num_requests=requests)
        assert first(LONG, busy, b, decode=True) == "b"
    assert (TOKENS_PER_DECODE_REQUEST, TOKENS_PER_PULLED_TOKEN) == (64, 0.125)


def test_what_states_cut_short_is_not_pulled_again() -> None:
    """Decode keeps its full attention and is brought the states: a pull of half costs 512 less.
    Alone it would have to compute all of it, so nothing else changes."""
    kept = Candidate("a", Hit(0, 0, 0.0, kept_tokens=4096))
    b = Candidate("b")
    assert first(LONG, kept, b, decode=True) == "a"
    assert first(LONG, replace(kept, num_requests=9), b, decode=True) == "b"
    for engines in ([kept, b], [b]):
        (best, *_) = PrefixAware().decide(LONG, engines, []).prefill
        assert best.cost == 8192
    almost = Candidate("a", Hit(0, 0, 0.0, kept_tokens=8191))
    assert not PrefixAware().decide(LONG, [b], [almost]).alone


def test_prompts_of_others_beat_a_hit_exactly_where_the_formula_says() -> None:
    """A holds 4096 of 8192; another client's prompt counts 512, so eight are worth its hit."""
    b = Candidate("b")
    for others in (0, 7):
        assert first(LONG, Candidate("a", hit(4096), num_others=others), b) == "a"
    for others in (9, 500):
        assert first(LONG, Candidate("a", hit(4096), num_others=others), b) == "b"


def test_a_hit_on_a_slower_medium_is_worth_less() -> None:
    """4096 tokens at 0.5 are worth 2048 on the fast one: more is better, equal is a tie."""
    slow = Candidate("slow", Hit(256, 4096, 128.0))
    assert first(LONG, slow, Candidate("fast", hit(2048 + 64))) == "fast"
    assert first(LONG, slow, Candidate("fast", hit(2048 - 64))) == "slow"


STORED = Hit(500, 8000, 250.0)
"""8000 tokens that are in a store only."""


def test_stored_tokens_are_worth_less_than_cached_and_more_than_none() -> None:
    assert first(LONG, Candidate("stored", STORED), Candidate("none")) == "stored"
    assert first(LONG, Candidate("stored", STORED), Candidate("cached", hit(8000))) == "cached"
    assert first(LONG, Candidate("b", STORED), Candidate("a", hit(3900))) == "b"
    assert first(LONG, Candidate("b", STORED), Candidate("a", hit(4100))) == "a"


def test_what_loading_costs_is_told_beside_what_is_computed() -> None:
    (one,) = PrefixAware().decide(LONG, [Candidate("a", STORED)], []).prefill
    assert one.cost == 192 + 4000
    assert one.why == "192 uncached + 4000 to load + 0 queued + 0 of others + 0 pressure"


def test_decode_serves_alone_what_it_can_load_from_a_store() -> None:
    """Only 192 tokens are left to compute; loading the others is weighed against prefill's hit."""
    decode = [Candidate("d", STORED)]
    assert PrefixAware().decide(LONG, [Candidate("p")], decode).alone
    assert PrefixAware().decide(LONG, [Candidate("p", STORED)], decode).alone
    assert not PrefixAware(alone_below=191).decide(LONG, [Candidate("p")], decode).alone


@pytest.mark.parametrize("decode", [False, True])
def test_an_engine_short_of_blocks_is_avoided(decode: bool) -> None:
    """At 0.9 of its blocks, half way above 0.8, a prompt's tokens count 2 times more."""
    calm = Candidate("b")
    at_limit = Candidate("a", hit(4096), kv_usage=PRESSURE_FROM_USAGE)
    pressed = Candidate("a", hit(4096), kv_usage=0.9)
    assert first(LONG, at_limit, calm, decode=decode) == "a"
    assert first(LONG, pressed, calm, decode=decode) == "b"
    (one,) = PrefixAware().decide(LONG, [pressed], []).prefill
    assert one.cost == pytest.approx(4096 + PRESSURE_PROMPTS / 2 * 8192)
    (full,) = PrefixAware().decide(LONG, [Candidate("a", kv_usage=1.0)], []).prefill
    assert full.cost == pytest.approx(8192 + PRESSURE_PROMPTS * 8192)


KEPT = replace(LONG, is_kept=True)
HALF = Candidate("a", kept_share=0.5)


def test_a_session_that_is_kept_begins_where_least_is_kept_and_stays_there() -> None:
    """8192 tokens more, of which half as much is kept as may be, count as 2 times as many more."""
    behind_queue = Candidate("b", queued_tokens=16_000)
    assert first(KEPT, HALF, behind_queue) == "b"
    assert first(KEPT, HALF, replace(behind_queue, queued_tokens=17_000)) == "a"
    assert first(KEPT, HALF, replace(behind_queue, kept_share=0.25)) == "a"
    # A later turn lacks little where the session is, so little is kept in addition.
    full_of_it = Candidate("a", hit(7680), kept_share=1.0)
    (one,) = PrefixAware().decide(KEPT, [full_of_it], []).prefill
    assert one.cost == 512 + PRESSURE_PROMPTS * 512
    assert first(KEPT, full_of_it, Candidate("b")) == "a"


@pytest.mark.parametrize("decode", [False, True])
def test_what_is_kept_is_no_reason_for_requests_that_keep_nothing(decode: bool) -> None:
    """Negative control; and decode keeps what it could pull again."""
    full = Candidate("a", kept_share=1.0)
    assert first(LONG, full, Candidate("b", queued_tokens=100, num_requests=2)) == "a"
    if decode:
        assert first(KEPT, full, Candidate("b", num_requests=2), decode=True) == "a"


def test_decode_that_computes_a_prompt_counts_what_it_keeps() -> None:
    alone = replace(KEPT, can_hand_over=False)
    (one,) = PrefixAware().decide(alone, [], [HALF]).decode
    assert one.cost == 8192 + PRESSURE_PROMPTS * 0.5 * 8192


def test_all_pressed_or_all_empty_is_no_reason_to_refuse() -> None:
    full = [Candidate(name, kv_usage=1.0) for name in NAMES]
    assert len(PrefixAware().decide(LONG, full, full).prefill) == len(NAMES)
    assert PrefixAware().decide(LONG, [], []) == Ranking((), (), why="handed over")


# --- Ties ---------------------------------------------------------------------------------


def preferred(beginning: bytes, engines: list[str]) -> str:
    return first(RouteQuery(1000, beginning), *map(Candidate, engines))


def test_prompts_that_begin_alike_meet_though_no_index_knows_where_they_lie() -> None:
    for beginning in (b"", b"x", b"a long beginning" * 99):
        order = names(PrefixAware().decide(RouteQuery(100, beginning), [], map_all(NAMES)))
        longer = RouteQuery(100_000, beginning)
        assert names(PrefixAware().decide(longer, [], map_all(NAMES))) == order


def map_all(engines: list[str]) -> list[Candidate]:
    return [Candidate(engine) for engine in engines]


# As BEGINNING_TOKENS leaves of a chat: its template first, and what is its own far behind.
@pytest.mark.parametrize("head", [b"", b"<|im_start|>system\n" * 40])
def test_different_beginnings_spread_over_the_engines(head: bytes) -> None:
    chosen = Counter(preferred(head + b"%d" % i, NAMES[:4]) for i in range(1000))
    assert len(chosen) == 4
    assert all(150 <= share <= 350 for share in chosen.values()), chosen


def test_an_engine_that_leaves_moves_only_its_own_prompts() -> None:
    before = {i: preferred(b"%d" % i, NAMES[:4]) for i in range(1000)}
    after = {i: preferred(b"%d" % i, NAMES[:3]) for i in range(1000)}
    gone = NAMES[3]
    assert {i for i in before if before[i] != after[i]} == {
        i for i, name in before.items() if name == gone
    }
    inherited = Counter(after[i] for i, name in before.items() if name == gone)
    assert all(inherited[name] >= 40 for name in NAMES[:3])  # shared out, not given to one


def test_less_than_a_tie_is_not_worth_another_engine() -> None:
    at_home = preferred(b"x", NAMES[:2])
    (away,) = {*NAMES[:2]} - {at_home}
    question = RouteQuery(1000, b"x")
    home = Candidate(at_home)
    assert first(question, home, Candidate(away, hit(48))) == at_home
    assert first(question, home, Candidate(away, hit(64))) == away


# --- Alone --------------------------------------------------------------------------------


@given(st.integers(0, 2000), st.integers(0, 130), st.integers(0, 600))
def test_decode_alone_exactly_where_it_holds_something_and_lacks_little(
    num_tokens: int, blocks: int, alone_below: int
) -> None:
    held = min(16 * blocks, num_tokens)
    decode = [Candidate("d", hit(held))]
    decision = PrefixAware(alone_below).decide(RouteQuery(num_tokens), map_all(NAMES), decode)
    assert decision.alone == (held > 0 and num_tokens - held <= alone_below)
    assert len(decision.prefill) == len(NAMES)  # should the holder be gone when it is asked


@pytest.mark.parametrize(("held", "alone"), [(0, False), (16, True), (700, False), (768, True)])
def test_the_edge_of_alone(held: int, alone: bool) -> None:
    num_tokens = 200 if held < 700 else 1024
    decision = PrefixAware(256).decide(
        RouteQuery(num_tokens), map_all(["p"]), [Candidate("d", hit(held))]
    )
    assert decision.alone == alone


def test_only_the_decode_engine_that_would_be_asked_first_counts() -> None:
    """Another one that holds all is so busy that prefill and an idle one are cheaper."""
    busy = Candidate("busy", hit(8176), num_requests=200)
    idle = Candidate("idle")
    decision = PrefixAware().decide(LONG, map_all(["p"]), [busy, idle])
    assert not decision.alone
    assert names(decision) == (["p"], ["idle", "busy"])
    assert PrefixAware().decide(LONG, map_all(["p"]), [replace(busy, num_requests=3), idle]).alone


# --- The others ---------------------------------------------------------------------------


def test_each_engine_has_its_turn_in_each_role() -> None:
    policy, three, two = RoundRobin(), map_all(NAMES[:3]), map_all(NAMES[:2])
    decided = [names(policy.decide(LONG, three, two)) for _ in range(6)]
    assert [prefill[0] for prefill, _ in decided] == NAMES[:3] * 2
    assert [decode[0] for _, decode in decided] == NAMES[:2] * 3
    # What decode serves alone is no prefill engine's turn.
    policy.decide(replace(LONG, can_hand_over=False), three, two)
    assert names(policy.decide(LONG, three, two))[0][0] == NAMES[0]


def test_random_is_fair_and_can_be_repeated() -> None:
    def drawn(seed: int) -> list[str]:
        policy = Random(random.Random(seed))
        return [names(policy.decide(LONG, map_all(NAMES[:4]), []))[0][0] for _ in range(1000)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert all(150 <= share <= 350 for share in Counter(drawn(1)).values())


def test_only_the_prefix_policy_looks_at_prompts() -> None:
    assert [name for name, kind in POLICIES.items() if kind.looks_at_prompts] == ["prefix"]
    assert Candidate("a").hit is NO_HIT
