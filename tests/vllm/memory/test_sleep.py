"""An engine that slept is another boot: nothing from before is read, and nothing hangs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.puller import reads
from pdconn.tools.lab.ports import free_ports
from tests.threads.inside import num_open
from tests.vllm.memory.sleeping import Core, Deaf, Engines, fall_asleep, greet, wake_up
from tests.vllm.runner.rig import LENT, PULLED, rig
from transport import BackendFailure
from transport.testing.inprocess.faults import Held

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.connector import PdconnConnector
    from pdconn.vllm.memory.sleep import IS_TOLD

Make = Callable[..., Engines]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Engines on a network of their own."""
    made: list[Engines] = []
    [port] = free_ports(1)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    with rig(monkeypatch) as both:  # for what it replaces

        def engines(prefill: type[PdconnConnector] = PdconnConnector) -> Engines:
            made.append(Engines(both.network, prefill))
            return made[-1]

        yield engines
        for each in made:
            each.close()


def test_what_is_lent_after_waking_is_read_where_it_is_now(make: Make) -> None:
    both = make()
    assert both.pull(both.lent("before")) == "received"
    both.prefill.scheduler.build_connector_meta(both.prefill.scheduled(0))
    assert both.pool.reset_prefix_cache()
    fall_asleep(both.prefill)
    wake_up(both.prefill)
    assert both.pull(both.lent("after")) == "received"
    assert both.is_pulled()
    assert (both.decode.cache.blocks(PULLED) == 3.0).all()


@pytest.mark.skipif(not IS_TOLD, reason="vLLM tells connectors from 0.33 on")
def test_vllms_own_engine_core_puts_it_to_sleep_and_wakes_it(make: Make) -> None:
    both = make()
    core = Core(both)
    assert both.pull(both.lent("before")) == "received"
    old = both.lent("old")
    core.core("sleep", 1)
    core.core("wake_up")
    assert both.pull(old) == "failed"
    assert both.pull(both.lent("after")) == "received"
    assert both.is_pulled()


def test_a_ticket_from_before_the_sleep_is_refused(make: Make) -> None:
    both = make()
    old = both.lent("old")
    assert both.pool.reset_prefix_cache(), "vLLM sleeps only after a reset, which takes it back"
    fall_asleep(both.prefill)
    wake_up(both.prefill)
    assert both.pull(old) == "failed"
    assert (both.decode.cache.blocks(PULLED) == 0.0).all(), "nothing of it was read"


def test_without_a_reset_the_new_boot_alone_refuses_it(make: Make) -> None:
    both = make()
    old = both.lent("old")
    fall_asleep(both.prefill)
    wake_up(both.prefill)
    assert both.pool.pinned() == [], "what was lent is over"
    assert both.pull(old) == "failed"
    assert both.pull(both.lent("new")) == "received"


def test_a_connector_that_does_not_hear_of_it_hands_over_wrong_bytes(make: Make) -> None:
    """Negative control: with neither a reset nor the hooks."""
    both = make(Deaf)
    old = both.lent("old")
    right = both.prefill.cache.blocks(LENT).clone()
    fall_asleep(both.prefill)
    wake_up(both.prefill)
    assert both.pull(old) == "received"
    assert (both.decode.cache.blocks(PULLED) != right).any()


def test_a_read_under_way_when_prefill_sleeps_is_not_used(make: Make) -> None:
    """A reset waits a second for it and revokes the lease; then its transport is gone."""
    both = make()
    both.network.script = lambda _: Held()
    both.decode.ask(both.lent("r"))
    both.decode.until(both.network.in_flight, lambda: both.decode.idle(both.decode.scheduled(0)))
    assert both.pool.reset_prefix_cache()
    fall_asleep(both.prefill)
    assert both.ended("r") == "failed"
    both.network.script = None
    wake_up(both.prefill)
    assert both.pull(both.lent("again")) == "received"


def test_waking_without_having_slept_changes_nothing(make: Make) -> None:
    both = make()
    request = both.lent("r")
    both.prefill.worker.restore_kv_caches()
    greet(both.prefill)
    assert both.pull(request) == "received"
    assert both.is_pulled()


def test_both_hooks_may_be_repeated(make: Make) -> None:
    both = make()
    for _ in range(2):
        fall_asleep(both.prefill)
        fall_asleep(both.prefill)
        wake_up(both.prefill)
        wake_up(both.prefill)
    assert both.pull(both.lent("r")) == "received"
    assert both.is_pulled()


def test_decode_does_not_sleep_while_a_read_can_write(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory would be unmapped, or another's, when the read lands."""
    monkeypatch.setattr(reads, "DRAIN_S", 0.2)
    both = make()
    both.network.script = lambda _: Held()
    both.decode.ask(both.lent("r"))
    both.decode.until(both.network.in_flight, lambda: both.decode.idle(both.decode.scheduled(0)))
    with pytest.raises(BackendFailure):
        fall_asleep(both.decode)
    both.network.script = None
    both.network.release_held()
    both.network.progress()
    fall_asleep(both.decode)
    wake_up(both.decode, 0.0)
    assert both.ended("r") == "failed", "it is recomputed: what it had read is unmapped"
    assert both.pull(both.lent("again")) == "received"
    assert both.is_pulled()


def test_a_request_that_waits_while_decode_sleeps_claims_its_ticket_anew(make: Make) -> None:
    both = make()
    decode = both.decode
    queued, asked_asleep = both.lent("queued"), both.lent("asleep")
    decode.scheduler.on_new_request(queued)
    decode.idle(decode.scheduled(0))
    fall_asleep(decode)
    decode.scheduler.on_new_request(asked_asleep)
    decode.idle(decode.scheduled(0))
    wake_up(decode, 0.0)
    for request in (queued, asked_asleep):
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (PULLED,), blocks=())
        count, _ = decode.scheduler.get_num_new_matched_tokens(request, 0)
        decode.scheduler.update_state_after_alloc(request, blocks, count)
        assert both.ended(request.request_id) == "received"
        assert both.is_pulled()
    assert num_open(decode.worker._worker._puller) == 0


def test_the_user_is_told_of_the_sleep(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    both = make()
    caplog.set_level(logging.INFO, logger="pdconn")
    fall_asleep(both.prefill)
    assert "KV memory is no longer registered" in caplog.text
