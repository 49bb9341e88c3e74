"""Blocks of vLLM's pool: pinned while their rows are read, free after it, and at a reset."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.lifecycle.promises import KeepShares
from pdconn.protocol.ticket import BlockList
from pdconn.store.engine.saves import Save
from pdconn.store.settings import StoreSettings
from tests.vllm.store.configured import TRAITS, config, layout, proven

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.protocol.keep import KeepOrder, SessionKey
    from pdconn.vllm.blocks.splits import Splits
    from pdconn.vllm.metadata import PdMetadata
    from pdconn.vllm.store.storing import Storing
    from tests.fakes.simulated.block_pool import CountedPool
    from tests.fakes.simulated.hooks import every_group, finished


class Scheduler:
    """Saves blocks 1, 2 and 5 of every request in each step."""

    def __init__(self) -> None:
        self.number, self.parts = 0, 1
        self.holes = 0
        self.cleared_to: list[str] = []
        self.salts: list[str | None] = []
        self.sessions: list[tuple[Any, ...]] = []
        self.broken: dict[SessionKey, str] = {}

    def turn_came(self, key: SessionKey) -> None:
        self.sessions.append(("came", key.session))

    def release_session(self, key: SessionKey) -> None:
        self.sessions.append(("released", key.session))

    def keep_turn(self, request: str, order: KeepOrder, num_tokens: int) -> bool:
        self.sessions.append(("kept", order.key.session, order.seconds, num_tokens))
        return True

    def keep_cut_to_s(self, order: KeepOrder) -> float | None:
        return KeepShares(seconds=100.0).cut_to_s(order.seconds)

    def take_broken(self, key: SessionKey) -> str | None:
        return self.broken.pop(key, None)

    def on_new_request(self, *args: Any, cache_salt: str | None, **more: Any) -> None:
        self.salts.append(cache_salt)

    def save_pass(self, request: str, before: int, after: int, ids: Any) -> Save:
        described = {1: (1, 2, 0, 5), 2: (2, 3, 4, 5, 0, 0, 10, 11)}[self.parts]
        described = (0,) * self.holes + described[self.holes :]
        assert ids() == (list(described),)
        self.number += 1
        return Save(self.number, (BlockList(0, described),), ())

    def take_commands(self) -> list[Any]:
        return []

    def note_results(self, results: list[int]) -> list[int]:
        return results

    def clear_rows(self, namespace: str) -> None:
        self.cleared_to.append(namespace)

    def request_finished(self, request: str) -> None: ...


@pytest.fixture
def store() -> Any:
    made = Storing(StoreSettings("root", 1 << 20), None, "writer", every_group())
    made.bind_gpu_block_pool(CountedPool(100))
    made._store = Scheduler()  # type: ignore[assignment]
    made._namespace = "ns"
    made.on_new_request(request())
    return made


def request(**changes: Any) -> Any:
    made = SimpleNamespace(
        request_id="r", prompt_token_ids=[1, 2], prompt_embeds=None, pooling_params=None,
        resumable=False, all_token_ids=[1, 2], num_prompt_tokens=2, num_computed_tokens=0,
        skip_reading_prefix_cache=False, lora_request=None, cache_salt=None,
        kv_transfer_params=None,
    )  # fmt: skip
    vars(made).update(changes)
    return made


def step(store: Any, name: str = "r") -> None:
    state = SimpleNamespace(get_block_ids=lambda request_id: ([1, 2, 0, 5],))
    output = SimpleNamespace(kv_connector_block_state=state, num_scheduled_tokens={name: 2})
    store.build_connector_meta(output, PdMetadata())


def test_blocks_are_pinned_until_all_ranks_have_read_them(store: Any) -> None:
    step(store)
    assert store._pins.pool.pinned() == [1, 2, 5]
    step(store)
    store.note_results([1])
    assert store._pins.pool.pinned() == [1, 2, 5]
    store.note_results([2])
    assert not store._pins.pool.pinned()
    assert store._pins.num_blocks == 0


def test_a_reset_unpins_first_and_names_another_place_for_rows(store: Any) -> None:
    step(store)
    assert store._pins.pool.reset_prefix_cache(), "it refuses while a block is in use"
    (first,) = store._store.cleared_to
    store._pins.pool.reset_prefix_cache()
    assert store._store.cleared_to[1] != first != "ns"
    store.note_results([1])  # comes late: nothing is freed twice


def test_weights_that_change_name_another_place_and_what_has_begun_is_not_saved(store: Any) -> None:
    """vLLM's own cache is not reset then (``clear_cache=false``)."""
    step(store)
    store.weights_changed()
    assert not store._pins.pool.pinned()
    assert store._store.cleared_to != ["ns"]
    step(store)
    assert not store._pins.pool.pinned(), "of both weights"
    finished(store, request())
    store.on_new_request(request())
    step(store)
    assert store._pins.pool.pinned() == [1, 2, 5], "of the new ones"
    store.weights_changed()
    assert len({"ns", *store._store.cleared_to}) == 3


def test_a_block_of_which_a_pull_wrote_only_the_end_is_not_saved(store: Any) -> None:
    store.skip_blocks("r", {0: 1})
    store._store.holes = 2
    step(store)
    assert store._pins.pool.pinned() == [5]
    finished(store, request())
    store.on_new_request(request())
    store._store.holes = 0
    step(store)
    assert store._pins.pool.pinned() == [1, 2, 5], "another request of the same name"


def test_no_more_than_a_quarter_of_the_blocks_is_pinned(store: Any) -> None:
    for _ in range(50):
        step(store)
    # Nine saves of three blocks: the tenth would begin above 25.
    assert store._pins.num_blocks == 27


def test_requests_without_keys_are_not_saved(store: Any) -> None:
    finished(store, request())
    store.on_new_request(request(pooling_params=object()))
    step(store)
    assert not store._pins.pool.pinned()


@pytest.mark.parametrize(
    ("salt", "saved"), [("theirs", (5, 4)), (None, (9, 0))], ids=["ours", "control"]
)
def test_each_tenant_that_is_there_has_its_share_of_that_quarter(
    salt: str | None, saved: tuple[int, int], store: Any
) -> None:
    """One that floods leaves a share to another; the control: requests of one tenant."""
    store.on_new_request(request(request_id="other", cache_salt=salt))
    counts = []
    for name in ("r", "other"):
        before = store._store.number
        for _ in range(50):
            step(store, name)
        counts.append(store._store.number - before)
    assert tuple(counts) == saved
    finished(store, request(request_id="other", cache_salt=salt))
    for _ in range(50):
        step(store)
    assert store._store.number == 9, "alone it has all of it"
    store.note_results(list(range(1, 10)))
    finished(store, request())
    assert not store._tenants
    assert not store._pins._of_tenant
    assert not store._pins._of_save


def test_rows_are_made_of_kernel_blocks_and_the_engines_blocks_are_pinned(store: Any) -> None:
    store._splits, store._store.parts = Splits((2,)), 2
    step(store)
    assert store._pins.pool.pinned() == [1, 2, 5]
    assert store._pins.num_blocks == 3
    store.note_results([1])
    assert not store._pins.pool.pinned()


def test_weights_that_nothing_proves_get_a_namespace_of_their_own_and_one_line_that_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of an object store; the control draws its weights itself."""

    def named(how: str, **changes: Any) -> str:
        model = config("x", model_weights="s3://models/tiny", **changes)
        model.load_config.load_format = how
        made = Storing(StoreSettings("root", 1 << 20), model, "writer", None)
        return made._name(proven(model, TRAITS), layout())

    assert named("dummy") == named("dummy")
    assert not caplog.records
    assert named("runai_streamer") != named("runai_streamer")
    first, _ = (record.getMessage() for record in caplog.records)
    assert "s3://models/tiny" in first
    assert "weights_id" in first


def test_the_store_gets_the_salt_by_which_tenants_are_known(store: Any) -> None:
    store.on_new_request(request(request_id="salted", cache_salt="tenant"))
    assert store._store.salts == [None, "tenant"]


def keeping(seconds: object, session: str = "s") -> dict[str, Any]:
    return {"pdconn": {"keep": {"session": session, "seconds": seconds, "tenant": "t"}}}


def end(store: Any, name: str, num_computed: int) -> Any:
    return store.request_finished(request(request_id=name), None, num_computed)


def test_a_turn_that_ends_is_kept_and_its_session_told(store: Any) -> None:
    store._store.broken[SessionKey("t", "s")] = "room"
    store.on_new_request(request(request_id="a", kv_transfer_params=keeping(60)))
    told = end(store, "a", 40)
    assert told == {"pdconn": {"kept": {"session": "s", "rows": True, "rows_broken": "room"}}}
    assert store._store.sessions == [("came", "s"), ("kept", "s", 60, 40)]
    store.on_new_request(request(request_id="b", kv_transfer_params=keeping(60)))
    assert end(store, "b", 40) == {"pdconn": {"kept": {"session": "s", "rows": True}}}


def test_a_turn_whose_rows_are_kept_for_less_than_it_asks_is_told_so(store: Any) -> None:
    store.on_new_request(request(request_id="a", kv_transfer_params=keeping(101)))
    told = end(store, "a", 40)
    assert told == {"pdconn": {"kept": {"session": "s", "rows": True, "rows_seconds": 100.0}}}


@pytest.mark.parametrize("seconds", [None, "long", -1, 1e9])
def test_a_turn_without_a_good_order_is_not_kept(store: Any, seconds: object) -> None:
    params = None if seconds is None else keeping(seconds)
    store.on_new_request(request(request_id="a", kv_transfer_params=params))
    assert end(store, "a", 40) is None
    assert store._store.sessions == []


def test_a_turn_that_was_aborted_is_not_kept(store: Any) -> None:
    store.on_new_request(request(request_id="a", kv_transfer_params=keeping(60)))
    assert end(store, "a", 0) is None
    assert store._store.sessions == [("came", "s")]


def test_a_session_is_released_by_a_request_whose_prompt_has_no_rows(store: Any) -> None:
    store.on_new_request(
        request(request_id="a", kv_transfer_params=keeping(0), prompt_embeds=object())
    )
    assert store._store.sessions == [("released", "s")]
