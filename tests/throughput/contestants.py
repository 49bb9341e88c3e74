"""Who is measured: connectors as rows, and the engines that each of them needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdconn.lab.client import Client, Timed, prefill_only
from pdconn.lab.engine import Engine
from pdconn.lab.ports import free_ports
from pdconn.lab.spec import EngineSpec

#: The answer goes on after its first token, as answers do.
ANSWER_TOKENS = 8

ALONE = "alone"

#: How engines share the cores, and how vLLM comes to do so.
CORES = {
    "apart": "prefill and an engine alone compute on core 0, decode on core 1",
    "auto": "vLLM's own choice: on two cores an engine with a connector takes both",
    "reserved": "vLLM's own choice with one core reserved: every engine's model on core 0",
    "float": "one thread each, wherever the kernel puts it",
    "one-process": "as float, and workers inside the engine core's process",
}

_WAKING = 5
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Connector:
    """A connector as an operator would configure it; ``kv_role`` is added for each side."""

    kv_transfer_config: Mapping[str, Any]
    layout: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


_PDCONN = {
    "kv_connector": "PdConnector",
    "kv_connector_module_path": "pdconn.vllm",
}


def _verifying(how: str) -> Connector:
    return Connector({**_PDCONN, "kv_connector_extra_config": {"verify": how}})


CONNECTORS = {
    "in-tree": Connector({"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}),
    "pdconn": Connector(_PDCONN),
    "pdconn-sample": _verifying("sample"),
    "pdconn-always": _verifying("always"),
    "pdconn-BLHNC": Connector(_PDCONN, layout="BLHNC"),
    "pdconn-BHLNC": Connector(_PDCONN, layout="BHLNC"),
}


@dataclass(frozen=True)
class Taken:
    """One prompt's way through a contestant, in seconds.

    Attributes:
        prefill_s: the prefill engine's request, sent to answered; of an engine
            alone, zero.
        first_s: the decode request, sent to its first streamed token; of an
            engine alone, of the only request.
        timed: the answer.
    """

    prefill_s: float
    first_s: float
    timed: Timed


@dataclass(frozen=True)
class Contestant:
    """Engines that answer prompts together: one alone, or prefill and decode."""

    name: str
    engines: tuple[Engine, ...]

    def answer(self, prompt: Sequence[int]) -> Taken:
        """Put one prompt through and time it."""
        first, *rest = (Client(engine.url, _TIMEOUT_S) for engine in self.engines)
        if not rest:
            timed = first.stream(prompt, ANSWER_TOKENS)
            return Taken(0.0, timed.first_token_s, timed)
        prefill_s, ticket = _prefill(first, prompt)
        timed = rest[0].stream(prompt, ANSWER_TOKENS, kv_transfer_params=ticket)
        return Taken(prefill_s, timed.first_token_s, timed)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let its engines run, and freeze them afterwards.

        Frozen, they take nothing from whoever is measured next, whatever their
        threads do when idle.
        """
        for engine in self.engines:
            engine.resume()
        try:
            for engine in self.engines:
                for _ in range(_WAKING):  # what froze has lost its caches
                    Client(engine.url).complete([4, 5, 6], 2)
            yield
        finally:
            for engine in self.engines:
                engine.pause()


def _prefill(client: Client, prompt: Sequence[int]) -> tuple[float, Mapping[str, Any] | None]:
    began = time.perf_counter()
    ticket = prefill_only(client, prompt)
    return time.perf_counter() - began, ticket


def specs(names: Sequence[str], model: Path, cores: str) -> list[EngineSpec]:
    """Engines for ``names``, in order: one for ``ALONE``, else prefill then decode.

    ``cores`` is a key of ``CORES``.
    """
    return [
        _spec(name, core, role, model, cores)
        for name in names
        for core, role in enumerate([None] if name == ALONE else ["prefill", "decode"])
    ]


def _spec(name: str, core: int, role: str | None, model: Path, cores: str) -> EngineSpec:
    port, side_channel = free_ports(2)
    spec = EngineSpec(
        name=name if role is None else f"{name}-{role}",
        model=model,
        port=port,
        cpus=(core,) if cores == "apart" else None,
        one_process=cores == "one-process",
        env=_binding(cores),
    )
    if role is None:
        return spec
    connector = CONNECTORS[name]
    kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
    return replace(
        spec,
        kv_transfer_config={**connector.kv_transfer_config, "kv_role": kv_role},
        side_channel_port=side_channel,
        layout=connector.layout,
        env={**spec.env, **connector.env},
    )


def _binding(cores: str) -> dict[str, str]:
    if cores == "auto":
        return {"VLLM_CPU_OMP_THREADS_BIND": "auto"}
    if cores == "reserved":
        return {"VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
    return {}


def contestants(names: Sequence[str], engines: Sequence[Engine]) -> list[Contestant]:
    """Deal ``engines``, started from ``specs(names)``, back to their names."""
    left = list(engines)
    dealt = []
    for name in names:
        count = 1 if name == ALONE else 2
        dealt.append(Contestant(name, tuple(left[:count])))
        del left[:count]
    return dealt
