"""Real engines of a small size behind ``pdconn proxy``, and what agents ask of them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdconn.router.fleet.prometheus_page import all_samples
from pdconn.tools.lab.engine import running
from pdconn.tools.lab.lab_client import Client, Timed
from pdconn.tools.lab.model import ModelSpec, write_model
from pdconn.tools.lab.ports import LOCALHOST, free_ports
from pdconn.tools.lab.proxy import admin_url, running_proxy
from pdconn.tools.lab.spec import EngineSpec

BLOCK = 32
SHARE = 0.8
"""Of an engine's blocks that promises may pin: this cache is small beside one session."""
MODEL = ModelSpec(
    "agents", hidden=256, intermediate=512, heads=8, kv_heads=4, layers=12, max_positions=1 << 14
)
_PATIENCE_S = 120.0
_LOOKED_UP = "vllm:prefix_cache_queries_total"
_FOUND = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
_BROKEN = ("promises_broken_room_total", "promises_broken_share_total")


@dataclass(frozen=True)
class Counts:
    """Tokens of prompts that prefill and decode have computed, and promises that were broken."""

    prefill_computed: int
    decode_computed: int
    broken: int


@dataclass(frozen=True)
class Fleet:
    """One prefill and one decode engine behind a router, and one engine alone.

    Attributes:
        num_blocks: of the caches of prefill and of decode.
        flood_at_once: requests of the flood that are under way.
    """

    alone: Client
    prefill: Client
    decode: Client
    router: Client
    num_blocks: int
    flood_at_once: int = 2

    def turn(self, prompt: Sequence[int], num_answer: int, **fields: Any) -> Timed:
        """A turn of a session, streamed."""
        return self.router.stream(prompt, num_answer, **fields)

    def flood(self, prompts: Sequence[Sequence[int]]) -> float:
        """One-off prompts, as many at once as there are places; requests per second."""
        began = time.perf_counter()
        with ThreadPoolExecutor(self.flood_at_once) as pool:
            list(pool.map(lambda prompt: self.router.complete(prompt, 1, top=1), prompts))
        return len(prompts) / (time.perf_counter() - began)

    def prefetch(self, prompt: Sequence[int]) -> None:
        """Bring a prompt to the engine that will be asked for it; returns when it is there."""
        before = self.routed("prefetches_total", outcome="done")
        answer = self._post("/v1/kv/prefetch", prompt=list(prompt))
        give_up = time.monotonic() + _PATIENCE_S
        while answer["action"] != "nothing":
            if self.routed("prefetches_total", outcome="done") > before:
                return
            assert time.monotonic() < give_up, "the prefetch has not ended"
            time.sleep(0.02)

    def release(self, session: str) -> None:
        """Keep nothing of a session any more."""
        self._post("/v1/kv/release", session_id=session)

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to what is accepted at once, with status 202."""
        raw = json.dumps({"model": self.router.model, **body}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(self.router.url + path, raw, headers)
        with urllib.request.urlopen(asked, timeout=_PATIENCE_S) as reply:
            return dict(json.loads(reply.read()))

    def counts(self) -> Counts:
        """The engines' counters, with those of their last steps."""
        prefill, decode = (_metrics(one) for one in (self.prefill, self.decode))
        pages = (prefill, decode)
        broken = sum(page.get(f"pdconn:{name}", 0.0) for page in pages for name in _BROKEN)
        return Counts(_computed(prefill), _computed(decode), int(broken))

    def routed(self, name: str, **labels: str) -> float:
        """A counter of the router."""
        samples = all_samples(Client(admin_url(self.router.url)).get_text("/metrics"))
        found = [one for one in samples if one.name == f"pdconn_router_{name}"]
        wanted = labels.items()
        return sum(one.value for one in found if wanted <= one.labels.items())


def _metrics(client: Client) -> dict[str, float]:
    client.complete((4, 5, 6), 1)  # metrics are those of the last step
    return client.metrics()


def _computed(page: dict[str, float]) -> int:
    return int(page.get(_LOOKED_UP, 0.0) - sum(page.get(name, 0.0) for name in _FOUND))


@contextmanager
def fleet(directory: Path, num_blocks: int, longest: int, args: Sequence[str]) -> Iterator[Fleet]:
    """Start engines and the router; ``args`` are the router's."""
    model = write_model(directory, MODEL)
    specs, words = [], []
    for name, role in (("alone", None), ("prefill", "kv_producer"), ("decode", "kv_consumer")):
        spec, word = _spec(name, role, model, num_blocks, longest)
        specs.append(spec)
        words.append(word)
    with running(specs, directory, cache=directory / "cache", timeout_s=600) as started:
        alone, prefill, decode = (Client(engine.url, _PATIENCE_S) for engine in started)
        with running_proxy([words[1]], [words[2]], directory, args=args) as url:
            yield Fleet(alone, prefill, decode, Client(url, _PATIENCE_S), num_blocks)


def _spec(
    name: str, role: str | None, model: Path, num_blocks: int, longest: int
) -> tuple[EngineSpec, str]:
    """One engine, and the word that names it to the router."""
    port, side, events, replay = free_ports(4)
    publishing = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    transfer = {
        "kv_connector": "PdconnConnector",
        "kv_connector_module_path": "pdconn.vllm",
        "kv_role": role,
        "kv_connector_extra_config": {"keep": {"share": SHARE, "tenant_share": SHARE}},
    }
    spec = EngineSpec(
        name=name,
        model=model,
        port=port,
        side_channel_port=side if role == "kv_producer" else None,
        kv_transfer_config=transfer if role else None,
        one_process=True,
        prefix_caching=True,
        num_blocks=num_blocks if role else 4 * num_blocks,
        kv_cache_mib=2048,
        block_tokens=BLOCK,
        max_model_len=longest,
        args=("--kv-events-config", json.dumps(publishing)) if role else (),
    )
    places = f"events=tcp://{{host}}:{events},replay=tcp://{{host}}:{replay}"
    return spec, f"http://{LOCALHOST}:{port},{places}"
