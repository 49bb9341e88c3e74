"""Laws of the parts of the scheduler's half: who answers, who brings, and that all hear of it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.simulated.hooks import half_of
from tests.fakes.simulated.requests import vllm_request

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput

    from pdconn.vllm.blocks.transferred import TransferBlocks
    from pdconn.vllm.scheduler import SchedulerParts
    from pdconn.vllm.scheduler_part import ASK_AGAIN, NOTHING, Matched, SchedulerPart

BLOCKS: Any = SimpleNamespace(get_block_ids=lambda: ([1, 2],), blocks=())


class Scripted(SchedulerPart):
    """Answers as it is told, and notes what it hears."""

    def __init__(self, name: str, answer: Matched | None = None) -> None:
        self.name, self.answer = name, answer
        self.heard: list[str] = []
        self.promised: list[tuple[int, bool]] = []

    def on_new_request(self, request: Any) -> None:
        self.heard.append("on_new_request")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        self.heard.append("asked")
        return self.answer

    def note_matched_tokens(self, request: Any) -> None:
        self.heard.append("answered")

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        assert blocks.ids == ([1, 2],)
        self.promised.append((num_external_tokens, is_promised))

    def update_connector_output(self, connector_output: Any) -> None:
        self.heard.append("update_connector_output")

    def request_finished(self, request: Any, blocks: Any, num_computed: int) -> Any:
        self.heard.append("request_finished")
        return {"by": self.name} if self.name == "lending" else None

    def take_counts(self) -> dict[str, int]:
        return {self.name: 1}

    def take_events(self) -> list[Any]:
        return [self.name]

    def has_pending_push_work(self) -> bool:
        return self.name == "lending"

    def shutdown(self) -> None:
        self.heard.append("shutdown")


NAMES = ("lending", "pulling", "storing")


def parts(**answers: Matched | None) -> tuple[Any, dict[str, Any]]:
    """A half of three parts that answer as they are told; there are no waits."""
    made: dict[str, Any] = {name: Scripted(name, answers.get(name)) for name in NAMES}
    every = SchedulerParts(pulling=made["pulling"], storing=made["storing"])
    every.every = (made["pulling"], made["lending"], made["storing"])
    every.asked = (made["lending"], *every.asked)
    half = half_of(every)
    return half, made


def request() -> Any:
    return vllm_request(request_id="r", status=None)


@pytest.mark.parametrize(
    ("answers", "answer", "asked"),
    [
        ({"lending": NOTHING, "pulling": (39, True), "storing": (32, True)}, NOTHING, 1),
        ({"pulling": ASK_AGAIN, "storing": (32, True)}, ASK_AGAIN, 2),
        ({"pulling": (39, True), "storing": (32, True)}, (39, True), 2),
        ({"storing": (32, True)}, (32, True), 3),
        ({"storing": ASK_AGAIN}, ASK_AGAIN, 3),
        ({}, NOTHING, 3),
    ],
    ids=["a prefix of ours", "a claim", "a ticket", "stored", "a look-up", "computed"],
)
def test_the_first_part_that_has_an_answer_answers(
    answers: dict[str, Matched], answer: Matched, asked: int
) -> None:
    half, made = parts(**answers)
    assert half.get_num_new_matched_tokens(request(), 0) == answer
    heard = [made[name].heard.count("asked") for name in NAMES]
    assert heard == [1] * asked + [0] * (3 - asked), "others are not asked, and begin nothing"
    answered = {name: made[name].heard.count("answered") for name in NAMES}
    assert set(answered.values()) == {int(answer != ASK_AGAIN)}, "blocks are allocated next"


@pytest.mark.parametrize("by", ["pulling", "storing"])
def test_what_is_promised_is_brought_by_the_part_that_promised_it(by: str) -> None:
    half, made = parts(**{by: (39, True)})
    half.get_num_new_matched_tokens(request(), 0)
    half.update_state_after_alloc(request(), BLOCKS, 39)
    for name in NAMES:
        assert made[name].promised == [(39, name == by)]


def test_what_parts_say_in_our_own_key_is_united_and_a_ticket_keeps_its_own() -> None:
    half, made = parts()
    ticket = {"remote_port": 1, "pdconn": {"version": 2}}
    made["lending"].request_finished = lambda *_: ticket
    made["storing"].request_finished = lambda *_: {"pdconn": {"kept": 9, "version": 7}}
    united = {"remote_port": 1, "pdconn": {"version": 2, "kept": 9}}
    assert half.request_finished(request(), ([1, 2],)) == united
    assert ticket["pdconn"] == {"version": 2}, "a ticket may be given to others, too"


def test_what_two_parts_say_of_one_session_is_united() -> None:
    half, made = parts()
    made["lending"].request_finished = lambda *_: {
        "pdconn": {"kept": {"session": "s", "tokens": 9}}
    }
    made["storing"].request_finished = lambda *_: {
        "pdconn": {"kept": {"session": "s", "rows": True}}
    }
    united = {"pdconn": {"kept": {"session": "s", "tokens": 9, "rows": True}}}
    assert half.request_finished(request(), ([1, 2],)) == united


def test_what_two_parts_report_of_other_sessions_is_one_list() -> None:
    half, made = parts()
    for name in ("lending", "storing"):
        said = {"pdconn": {"broken": [{"session": name}]}}
        made[name].request_finished = lambda *_, said=said: said
    united = {"pdconn": {"broken": [{"session": "storing"}, {"session": "lending"}]}}
    assert half.request_finished(request(), ([1, 2],)) == united


def test_a_promise_lapses_when_vllm_asks_again_or_the_request_leaves() -> None:
    """The store's, when a ticket answers later: both would write to the same blocks."""
    half, made = parts(storing=(32, True))
    half.get_num_new_matched_tokens(request(), 0)
    made["pulling"].answer = (39, True)
    half.get_num_new_matched_tokens(request(), 0)
    half.update_state_after_alloc(request(), BLOCKS, 39)
    assert [made[name].promised for name in NAMES] == [[(39, False)], [(39, True)], [(39, False)]]
    half.get_num_new_matched_tokens(request(), 0)
    half.request_finished(request(), ([1, 2],))
    half.update_state_after_alloc(request(), BLOCKS, 39)
    assert made["pulling"].promised[-1] == (39, False)
    assert not half._promised


def test_every_part_hears_of_every_hook_and_one_answers_at_the_end() -> None:
    half, made = parts()
    half.on_new_request(request())
    half.update_connector_output(KVConnectorOutput())
    assert half.request_finished(request(), ([1, 2],)) == {"by": "lending"}
    half.shutdown()
    hooks = ["on_new_request", "update_connector_output", "request_finished", "shutdown"]
    assert all(part.heard == hooks for part in made.values())
    assert half.get_kv_connector_stats().data["counts"] == dict.fromkeys(NAMES, 1)
    assert sorted(half.take_events()) == sorted(NAMES)
    assert half.has_pending_push_work()


def test_tokens_come_from_a_peer_unless_a_part_says_otherwise() -> None:
    half, made = parts()
    assert half.get_external_cache_hit_sources(request(), 0) == {}
    assert half.get_external_cache_hit_sources(request(), 7) == {CacheHitSource.P2P: 7}
    disk = {CacheHitSource.DISK: 7}
    made["storing"].get_external_cache_hit_sources = lambda request, count: disk
    assert half.get_external_cache_hit_sources(request(), 7) == disk


def test_a_part_leaves_out_what_it_has_nothing_to_do_with() -> None:
    """Of any hook, so that adding one to vLLM's half needs no change of the other parts."""
    part, blocks = SchedulerPart(), TransferBlocks(None, ())
    assert part.get_num_new_matched_tokens(request(), 0) is None
    assert part.request_finished(request(), blocks, 0) is None
    assert not part.has_pending_push_work()
    assert (part.is_load_optional("r"), part.fills_blocks, part.lends) == (False,) * 3
    assert (part.take_counts(), part.take_gauges(), list(part.take_events())) == ({}, {}, [])
