"""An engine that slept is another boot: nothing from before is read, and nothing hangs.

``PdconnConnector`` in both roles, called as vLLM 0.33 does when an engine sleeps and wakes; a real
side channel, a real puller, and bytes that move in this process.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pdconn.lab.ports import free_ports
from pdconn.puller import reader_thread
from pdconn.vllm.config import ConfigError, read_settings
from tests.vllm.runner.rig import LENT, PROMPT, PULLED, Cache, Steps, rig
from tests.vllm.test_producer import Pool
from transport import BackendFailure
from transport.inprocess.faults import Held
from transport.inprocess.network import InProcessNetwork

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.v1.request import RequestStatus

    from pdconn.vllm.connector import PdconnConnector
    from pdconn.vllm.memory import sleep
    from pdconn.vllm.memory.opening import open_nixl
    from pdconn.vllm.memory.sleep import IS_TOLD, check_sleep, options_for_sleep
    from pdconn.vllm.supported import check_supported


class Deaf(PdconnConnector):
    """As connectors were: the sleep passes by."""

    def unregister_kv_caches(self) -> None:
        """Nothing."""

    def restore_kv_caches(self) -> None:
        """Nothing."""


class Engines:
    """Prefill, with its own scheduler and pool, and decode."""

    def __init__(self, network: InProcessNetwork, prefill: type[PdconnConnector]) -> None:
        self.network, self.pool = network, Pool()
        self.prefill = Steps("kv_producer", prefill, Cache(filled=True))
        self.decode = Steps("kv_consumer", PdconnConnector, Cache(filled=False))
        self.prefill.scheduler.bind_gpu_block_pool(self.pool)
        for each in (self.prefill, self.decode):
            greet(each)

    def lent(self, name: str) -> Any:
        """A request that prefill has finished and lent, as decode gets it."""
        made = SimpleNamespace(
            request_id=name,
            prompt_token_ids=PROMPT,
            num_prompt_tokens=len(PROMPT),
            num_computed_tokens=len(PROMPT),
            num_tokens=len(PROMPT),
            lora_request=None,
            mm_features=[],
            kv_transfer_params={"do_remote_decode": True},
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        _, params = self.prefill.scheduler.request_finished(made, LENT)
        assert params is not None
        made.kv_transfer_params = params
        return made

    def ended(self, name: str) -> str:
        """How decode's pull ends: ``received`` or ``failed``."""
        decode = self.decode
        decode.until(
            lambda: name in decode.reported("finished_recving"),
            lambda: decode.idle(decode.scheduled(0)),
        )
        return "failed" if name in decode.reported("failed_recving") else "received"

    def pull(self, request: Any) -> str:
        """Ask for what a ticket names; how it ends."""
        self.decode.ask(request)
        return self.ended(request.request_id)

    def is_pulled(self) -> bool:
        """Whether decode holds what prefill holds."""
        theirs, ours = self.prefill.cache.blocks(LENT), self.decode.cache.blocks(PULLED)
        return bool((theirs == ours).all())

    def close(self) -> None:
        self.network.script = None
        self.network.release()
        self.decode.close()
        self.prefill.close()


def greet(each: Steps) -> None:
    """vLLM collects every worker's registration, at the start and after waking."""
    handshake = each.worker.get_handshake_metadata()
    each.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})


def fall_asleep(each: Steps) -> None:
    each.worker.unregister_kv_caches()
    each.cache.blocks(LENT)  # its pages are still there, as the in-process bytes need them


def wake_up(each: Steps, value: float = 3.0) -> None:
    """With other pages, that hold ``value``."""
    for layer in each.cache.layers.values():
        layer.fill_(value)
    each.worker.restore_kv_caches()
    greet(each)


@pytest.fixture
def network() -> InProcessNetwork:
    return InProcessNetwork()


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


class Core:
    """What vLLM's engine core calls as it sleeps and wakes, of an engine with one worker."""

    def __init__(self, both: Engines) -> None:
        self._both = both
        self.scheduler = SimpleNamespace(
            get_kv_connector=lambda: both.prefill.scheduler, set_pause_state=lambda state: None
        )
        self.model_executor = self
        self.is_sleeping = False

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        assert not clear_cache or self._both.pool.reset_prefix_cache()

    def resume_scheduler(self) -> None:
        """Nothing was paused."""

    def sleep(self, level: int) -> None:
        self.is_sleeping = True
        self._both.prefill.worker.unregister_kv_caches()

    def wake_up(self, tags: object) -> None:
        self.is_sleeping = False
        for layer in self._both.prefill.cache.layers.values():
            layer.fill_(3.0)
        self._both.prefill.worker.restore_kv_caches()

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        return [{(0, 0): self._both.prefill.worker.get_handshake_metadata()}]

    def core(self, name: str, *words: object) -> None:
        """A method of vLLM's engine core, on this."""
        from vllm.v1.engine.core import EngineCore

        getattr(EngineCore, name)(self, *words)

    def _set_kv_connector_handshake_metadata(self) -> None:
        self.core("_set_kv_connector_handshake_metadata")


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
    monkeypatch.setattr(reader_thread, "DRAIN_S", 0.2)
    both = make()
    both.network.script = lambda _: Held()
    both.decode.ask(both.lent("r"))
    both.decode.until(both.network.in_flight, lambda: both.decode.idle(both.decode.scheduled(0)))
    with pytest.raises(BackendFailure):
        fall_asleep(both.decode)
    both.network.script = None
    both.network.release()
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
        blocks: Any = SimpleNamespace(get_block_ids=lambda: (PULLED,))
        count, _ = decode.scheduler.get_num_new_matched_tokens(request, 0)
        decode.scheduler.update_state_after_alloc(request, blocks, count)
        assert both.ended(request.request_id) == "received"
        assert both.is_pulled()
    assert decode.worker._worker._puller.num_open == 0


# What may sleep


def transfer(role: str = "kv_both", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="PdconnConnector",
        kv_role=role,
        kv_connector_extra_config=extra,  # type: ignore[arg-type]
    )


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 0.32 as well, what 0.33 is asked."""
    monkeypatch.setattr(sleep, "IS_TOLD", True)


def test_vllm_0_32_does_not_tell_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "IS_TOLD", False)
    with pytest.raises(ConfigError, match=r"enable_sleep_mode: expected False.*0\.32"):
        PdconnConnector.supports_sleep_mode(transfer())


def test_this_vllm_tells_if_it_has_the_hooks() -> None:
    import vllm

    assert (tuple(map(int, vllm.__version__.split("+")[0].split(".")[:2])) >= (0, 33)) == IS_TOLD


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("extra", "environ", "error"),
    [
        ({}, {}, None),
        ({}, {"UCX_TLS": "^cuda_ipc"}, None),
        ({}, {"UCX_TLS": "rc,cuda_copy,tcp"}, None),
        ({}, {"UCX_TLS": "^rc,cuda"}, None),
        ({}, {"UCX_TLS": "all"}, r"UCX_TLS: expected \^cuda_ipc.*got 'all'"),
        ({}, {"UCX_TLS": "rc,cuda_ipc"}, "UCX_TLS: expected"),
        ({}, {"UCX_TLS": "rc,cuda"}, "UCX_TLS: expected"),
        ({}, {"UCX_TLS": "^rc"}, "UCX_TLS: expected"),
        (
            {"backend_options": {"UCX": {"engine_config": "X=1,UCX_TLS=all"}}},
            {},
            "backend_options UCX engine_config TLS: expected",
        ),
        (
            {"backend_options": {"UCX": {"engine_config": "TLS=all"}}},
            {"UCX_TLS": "tcp"},
            None,
        ),
        ({"backends": ["UCX", "GDS"]}, {}, r"backends: expected \['UCX'\]"),
        ({"store": {"root": "/kv"}}, {}, "enable_sleep_mode: .*a store"),
    ],
)
def test_what_stands_against_sleep_is_named(
    extra: dict[str, Any], environ: dict[str, str], error: str | None
) -> None:
    if error is None:
        check_sleep(transfer(**extra), environ)
        return
    with pytest.raises(ConfigError, match=error):
        check_sleep(transfer(**extra), environ)
    if "TLS" in error:  # an engine that only reads offers nobody its memory
        check_sleep(transfer("kv_consumer", **extra), environ)


@pytest.mark.usefixtures("told")
def test_the_engines_start_checks_it_too() -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(enable_sleep_mode=True),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=transfer(backends=["UCX"]),
    )
    check_supported(config)
    config.kv_transfer_config = transfer(store={"root": "/kv"})
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        check_supported(config)


def test_a_lender_that_may_sleep_offers_no_mappings_of_its_memory() -> None:
    assert options_for_sleep({}) == {"UCX": {"engine_config": "TLS=^cuda_ipc"}}
    theirs = {"UCX": {"engine_config": "TLS=tcp", "num_workers": "1"}}
    merged = options_for_sleep(theirs)["UCX"]
    assert merged == {"engine_config": "TLS=^cuda_ipc,TLS=tcp", "num_workers": "1"}
    assert theirs["UCX"]["engine_config"] == "TLS=tcp"


@pytest.mark.parametrize(
    ("lends", "sleeps", "config"),
    [(True, True, "TLS=^cuda_ipc"), (True, False, None), (False, True, None)],
)
def test_only_lenders_that_may_sleep_are_restricted(
    lends: bool, sleeps: bool, config: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(
        "pdconn.vllm.memory.opening.NixlTransport", lambda name, **options: opened.append(options)
    )
    vllm_config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
    open_nixl(read_settings({}, "127.0.0.1", 1, 0), vllm_config, "name", lends=lends)
    [options] = opened
    assert options["backend_options"].get("UCX", {}).get("engine_config") == config


def test_the_user_is_told_of_the_sleep(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    both = make()
    caplog.set_level(logging.INFO, logger="pdconn")
    fall_asleep(both.prefill)
    assert "KV memory is not registered any more" in caplog.text
