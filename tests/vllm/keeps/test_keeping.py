"""Kept sessions hit, and requests that lack blocks get them, with vLLM's own scheduler."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.lifecycle.promises import KeepShares
    from pdconn.vllm.keeps.keeping import Keeping
    from pdconn.vllm.keeps.needs import BlockNeeds
    from tests.vllm.keeps.conversing import Chat, Conversing
    from tests.vllm.patches.hybrid_engines import KINDS

Start = Callable[..., Conversing]

HITTING = tuple(kind for kind in KINDS if kind not in ("window of one token", "many"))
"""Of a window of one token vLLM keeps nothing."""
MOST = KeepShares(share=0.9, tenant_share=0.9)


@pytest.fixture
def start() -> Iterator[Start]:
    """Engines; closed behind the test."""
    begun: list[Conversing] = []

    def made(kind: str = "full", num_blocks: int = 400, **how: Any) -> Conversing:
        begun.append(Conversing(KINDS[kind], num_blocks, **how))
        return begun[-1]

    yield made
    for one in begun:
        one.close()


# The next turn hits


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize("kind", HITTING)
def test_the_next_turn_hits_after_a_flood_of_twice_the_cache(
    start: Start, kind: str, role: str
) -> None:
    one = start(kind, role=role)
    chat = one.chat("s", 1280)
    for number in range(3):
        one.turn(chat, 60.0, further=32)
        held = one.hit([*chat.tokens, 1])
        assert chat.told == {"session": "s", "tokens": held, "used": number > 0}
        assert held >= 0.95 * len(chat.tokens)
        one.flood()
        assert one.hit([*chat.tokens, 1]) == held
    assert one.counts["promises_used"] == 2
    assert one.counts.total() == 5, "three were made, and none broken"


@pytest.mark.parametrize("kind", HITTING)
def test_without_keep_the_flood_has_evicted_it(start: Start, kind: str) -> None:
    """Negative control."""
    one = start(kind)
    chat = one.chat("s", 1280)
    one.turn(chat, None)
    assert one.hit([*chat.tokens, 1]) >= 0.95 * len(chat.tokens)
    # Blocks that no window needs any more are used again first.
    one.flood(30.0 if kind == "window alone" else 2.0)
    assert one.hit([*chat.tokens, 1]) <= 0.1 * len(chat.tokens)


def test_where_nothing_is_cached_nothing_is_kept_and_that_is_told(start: Start) -> None:
    one = start(is_caching=False)
    chat = one.chat("s", 640)
    one.turn(chat, 60.0)
    assert chat.told == {
        "session": "s",
        "tokens": 0,
        "used": False,
        "refused": "not_cached",
    }
    assert (one.used_blocks(), len(one.keeping)) == (0, 0)


# It ends


def test_blocks_are_free_when_the_time_is_up(start: Start) -> None:
    one = start()
    chat = one.chat("s", 640)
    one.turn(chat, 60.0)
    assert one.used_blocks() == 640 // 16
    one.clock.advance(59.0)
    one.step()
    assert one.used_blocks() == 640 // 16
    one.clock.advance(1.0)
    one.step()
    assert (one.used_blocks(), len(one.keeping)) == (0, 0)


def test_gauges_are_told_once_they_have_changed(start: Start) -> None:
    one = start()
    told: dict[str, int] = {}
    taking = one.keeping.take_gauges

    def taken() -> dict[str, int]:
        found: dict[str, int] = taking()
        told.update(found)
        return found

    one.keeping.take_gauges = taken
    one.turn(one.chat("", 64), None)
    assert told == {}, "an engine that keeps nothing has none"
    one.turn(one.chat("s", 640), 60.0)
    assert told == {"kept_blocks": 40, "kept_sessions": 1, "blocks": 400, "keepable_blocks": 200}
    assert taking() == {}
    one.clock.advance(60.0)
    one.turn(one.chat("", 64), None)
    assert told == {"kept_blocks": 0, "kept_sessions": 0, "blocks": 400, "keepable_blocks": 200}


def test_blocks_are_free_when_a_request_releases_them(start: Start) -> None:
    one = start()
    chats = [one.chat("s", 320, tenant) for tenant in "ab"]
    for chat in chats:
        one.turn(chat, 60.0)
    one.arrive([1], chats[0].keep(0))
    one.run()
    assert one.used_blocks() == 320 // 16, "a session of this name of another tenant stays"
    assert one.hit([*chats[0].tokens, 1]) > 0, "it is cached as long as no other needs the blocks"


def test_a_reset_of_the_cache_breaks_every_promise(start: Start) -> None:
    one = start()
    chat = one.chat("s", 640)
    one.turn(chat, 60.0)
    assert one.manager.reset_prefix_cache()
    assert one.used_blocks() == 0
    assert one.turn(chat, 60.0, further=16) == 0
    assert chat.told["broken"] == "reset"
    one.turn(chat, 60.0)
    assert "broken" not in chat.told, "it is told once"


def test_other_weights_break_every_promise(start: Start) -> None:
    one = start()
    one.turn(one.chat("s", 640), 60.0)
    one.engine.connector._scheduler.weights.weights_changed("update_weights")
    assert one.used_blocks() == 0


def test_a_turn_that_was_aborted_leaves_the_earlier_one_kept(start: Start) -> None:
    one = start()
    chat = one.chat("s", 640)
    one.turn(chat, 60.0)
    name = one.arrive([*chat.tokens, *range(600)], chat.keep(60.0))
    one.engine.schedule()
    one.engine.abort(name)
    one.engine.process()
    one.run()
    assert one.used_blocks() == 640 // 16
    assert len(one.keeping) == 1


# It gives way


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("kind", sorted({*HITTING} - {"state alone"}))
def test_a_request_that_lacks_kept_blocks_is_admitted_and_the_session_is_told(
    start: Start, kind: str, is_async: bool
) -> None:
    size = 120 if kind == "window alone" else 450
    one = start(kind, num_blocks=size, is_async=is_async, shares=MOST)
    chats: list[Chat] = []
    while not one.lacks(1500) and len(chats) < 50:
        chats.append(one.chat(f"s{len(chats)}", 400))
        one.turn(chats[-1], 600.0)
    assert not one.counts["promises_broken_room"]
    one.turn(one.chat("large", 1500), None)
    broken = one.counts["promises_broken_room"]
    assert 1 <= broken < len(chats), "no more than are needed"
    for chat in chats[broken:]:
        assert one.hit([*chat.tokens, 1]) >= 0.9 * len(chat.tokens)
    told = []
    for chat in (chats[0], chats[-1]):
        one.turn(chat, 600.0)
        told.append(chat.told.get("broken"))
    assert told == ["room", None], "the oldest promise gives way first"


@pytest.mark.parametrize(
    ("params", "names_others"),
    [
        ({"pdconn": {"prefetch": True}}, True),
        ({"do_remote_decode": True}, True),
        (None, False),
        ({"pdconn": {"lend_back": False}}, False),
    ],
    ids=["prefetch", "prefill", "a client's", "decode"],
)
def test_an_answer_that_no_client_sees_names_the_sessions_that_were_displaced_once(
    start: Start, params: dict[str, Any] | None, names_others: bool
) -> None:
    """The last two are negative controls: such an answer is a client's."""
    one = start(num_blocks=110, shares=MOST)
    one.turn(one.chat("s", 640, tenant="t"), 600.0)
    told = []
    for name in (one.arrive(one.chat("", 1600).tokens, params) for _ in range(2)):
        one.run()
        told.append(((one.answers[name] or {}).get("pdconn") or {}).get("broken"))
    assert one.counts["promises_broken_room"] == 1
    report = [{"session": "s", "tenant": "t", "why": "room"}]
    assert told == [report if names_others else None, None]


def test_the_answer_of_an_aborted_request_takes_no_report(start: Start) -> None:
    one = start(num_blocks=110, shares=MOST)
    one.turn(one.chat("s", 640), 600.0)
    marked = {"pdconn": {"prefetch": True}}
    name = one.arrive(one.chat("", 1600).tokens, marked)
    one.engine.schedule()
    one.engine.abort(name)
    one.engine.process()
    one.run()
    assert one.counts["promises_broken_room"] == 1
    name = one.arrive(one.chat("", 64).tokens, marked)
    one.run()
    assert [each["session"] for each in one.answers[name]["pdconn"]["broken"]] == ["s"]


def test_a_turn_that_pushes_out_another_session_reports_it_beside_what_it_keeps(
    start: Start,
) -> None:
    one = start(num_blocks=100, shares=KeepShares(share=0.5, tenant_share=0.5))
    first, second = one.chat("s", 480), one.chat("t", 480)
    one.turn(first, 600.0)
    asked = second.keep(600.0)["pdconn"] | {"prefetch": True}
    name = one.arrive(second.tokens, {"pdconn": asked})
    one.run()
    said = one.answers[name]["pdconn"]
    assert said["kept"]["tokens"] > 0
    assert said["broken"] == [{"session": "s", "tenant": "a", "why": "share"}]


def test_the_turn_of_a_kept_session_does_not_break_its_own_promise(start: Start) -> None:
    """It needs 41 blocks of 60, 40 of which are kept for it; two other sessions are older."""
    one = start(num_blocks=60, shares=MOST)
    others = [one.chat(f"o{number}", 64) for number in range(2)]
    for chat in others:
        one.turn(chat, 600.0)
    chat = one.chat("s", 640)
    one.turn(chat, 600.0)
    assert one.turn(chat, 600.0, further=24) == 640
    assert one.counts["promises_broken_room"] == 0


def test_no_promise_is_broken_for_a_request_that_has_to_wait_for_others_in_any_case(
    start: Start,
) -> None:
    """It needs 94 of 109 blocks; 40 are kept, and 50 are in use until another one ends."""
    one = start(num_blocks=110, shares=MOST)
    one.turn(one.chat("s", 640), 600.0)
    one.arrive(one.chat("", 790).tokens, answer=60)
    one.step()
    one.arrive(one.chat("", 1490).tokens)
    for _ in range(40):
        one.step()
    assert one.counts["promises_broken_room"] == 0
    one.run()
    assert one.counts["promises_broken_room"] == 1


def _preemptions(one: Conversing) -> int:
    """Three requests grow until they need what is kept; how often one of them is preempted."""
    chat = one.chat("s", 640)
    one.turn(chat, 600.0)
    names = [one.arrive(one.chat("", 100).tokens, answer=400) for _ in range(3)]
    requests = [one.scheduler.requests[name] for name in names]
    one.run()
    assert one.counts["promises_broken_room"] == 1
    return sum(request.num_preemptions for request in requests)


@pytest.mark.parametrize("is_async", [True, False])
def test_no_running_request_is_preempted_for_what_is_kept(start: Start, is_async: bool) -> None:
    assert _preemptions(start(num_blocks=110, shares=MOST, is_async=is_async)) == 0


def test_running_requests_whose_growth_is_not_counted_are_preempted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(BlockNeeds, "_growth", lambda *_: 0)
    assert _preemptions(start(num_blocks=110, shares=MOST)) > 0


def test_promises_that_do_not_give_way_starve_requests(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control."""
    monkeypatch.setattr(Keeping, "make_room", lambda self, num_blocks: None)
    one = start(num_blocks=110, shares=MOST)
    one.turn(one.chat("s", 1280), 600.0)
    one.arrive(one.chat("", 800).tokens)
    with pytest.raises(AssertionError, match="starve"):
        one.run(200)


# It is bounded


def test_a_tenant_that_keeps_without_end_is_bounded_and_others_are_served(start: Start) -> None:
    one = start(num_blocks=400, shares=KeepShares(share=0.5, tenant_share=0.3))
    chat = one.chat("s", 640, tenant="a")
    one.turn(chat, 600.0)
    greedy = [one.chat(f"g{number}", 160, tenant="g") for number in range(60)]
    for each in greedy:
        one.turn(each, 600.0)
    assert one.keeping.num_blocks <= 200
    assert one.keeping._promises is not None
    assert one.keeping._promises.size_of_tenant("g") <= 120
    assert one.counts["promises_broken_share"] == 60 - 120 // 10
    assert one.turn(chat, 600.0, further=16) >= 640, "who kept little has lost nothing"
    one.turn(greedy[0], 600.0)
    assert greedy[0].told["broken"] == "share"


def test_a_session_above_its_tenants_share_is_refused_and_told(start: Start) -> None:
    one = start(num_blocks=100, shares=KeepShares(share=0.5, tenant_share=0.2))
    chat = one.chat("s", 640)
    one.turn(chat, 600.0)
    assert chat.told == {"session": "s", "tokens": 0, "used": False, "refused": "share"}
    assert one.counts["promises_refused"] == 1
    assert one.used_blocks() == 0


@pytest.mark.parametrize(("asked", "granted"), [(60.0, {}), (600.0, {"seconds": 60.0})])
def test_a_session_is_told_for_how_long_it_is_kept_if_for_less_than_it_asks(
    start: Start, asked: float, granted: dict[str, float]
) -> None:
    one = start(shares=KeepShares(seconds=60.0))
    chat = one.chat("s", 640)
    one.turn(chat, asked)
    assert chat.told == {"session": "s", "tokens": 640, "used": False, **granted}
    one.clock.advance(59.0)
    one.step()
    assert one.used_blocks() == 640 // 16
    one.clock.advance(1.0)
    one.step()
    assert one.used_blocks() == 0


def test_ten_thousand_names_leave_a_bounded_table(start: Start) -> None:
    """All of one short prompt, so that blocks do not bound them."""
    one = start(num_blocks=100)
    prompt = one.chat("", 32).tokens
    for number in range(1500):
        one.arrive(prompt, Chat(f"n{number}", prompt).keep(600.0), answer=1)
        if number % 100 == 99:
            one.run()
    one.run()
    assert len(one.keeping) <= 1024
    assert one.keeping.num_blocks == 2
    one.clock.advance(601.0)
    one.step()
    assert (len(one.keeping), one.used_blocks()) == (0, 0)


@pytest.mark.parametrize(
    "keep",
    [7, {}, {"session": ""}, {"session": "s" * 129}, {"session": "s", "seconds": "9"},
     {"session": "s", "seconds": -1}, {"session": "s", "seconds": float("nan")},
     {"session": "s", "seconds": 1e9}, {"session": "s", "seconds": True},
     {"session": "s", "tenant": 7, "seconds": 9}, {"session": "s\n", "seconds": 9}],
)  # fmt: skip
def test_what_is_no_order_keeps_nothing_and_the_request_is_served(start: Start, keep: Any) -> None:
    one = start()
    name = one.arrive(one.chat("", 64).tokens, {"pdconn": {"keep": keep}})
    one.run()
    assert name in one.answers
    assert (one.used_blocks(), len(one.keeping)) == (0, 0)
