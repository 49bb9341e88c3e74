"""Prefill and decode that fall asleep and wake up, called as vLLM 0.33 does.

``PdconnConnector`` in both roles, a real side channel, a real puller, and bytes that move in this
process.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

from tests.fakes.simulated.block_pool import CountedPool
from tests.fakes.simulated.requests import vllm_request
from tests.vllm.lends.scheduler import untried
from tests.vllm.runner.rig import LENT, PROMPT, PULLED, Cache, Steps
from transport.testing.inprocess.transport import InProcessNetwork

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.request import RequestStatus

    from pdconn.vllm.connector import PdconnConnector


class Deaf(PdconnConnector):
    """As connectors were: the sleep passes by."""

    def unregister_kv_caches(self) -> None:
        """Nothing."""

    def restore_kv_caches(self) -> None:
        """Nothing."""


class Engines:
    """Prefill, with its own scheduler and pool, and decode."""

    def __init__(self, network: InProcessNetwork, prefill: type[PdconnConnector]) -> None:
        self.network, self.pool = network, CountedPool()
        self.prefill = Steps("kv_producer", prefill, Cache(filled=True))
        self.decode = Steps("kv_consumer", PdconnConnector, Cache(filled=False))
        self.prefill.scheduler.bind_gpu_block_pool(self.pool)
        for each in (self.prefill, self.decode):
            untried(each.scheduler)
            greet(each)

    def lent(self, name: str) -> Any:
        """A request that prefill has finished and lent, as decode gets it."""
        made = vllm_request(
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
        self.network.release_held()
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
