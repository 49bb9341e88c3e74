"""The engines of each contestant: connectors, and the assignment of cores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec

_T = TypeVar("_T")

#: Assignments of cores to engines.
CORES: Mapping[str, str] = MappingProxyType(
    {
        "apart": "prefill, or a single engine, computes on core 0, decode on core 1",
        "auto": "vLLM's own choice: on two cores an engine with a connector takes both",
        "reserved": "vLLM's own choice with one core reserved: every engine's model on core 0",
        "float": "one thread each, wherever the kernel puts it",
        "one-process": "as float, and workers inside the engine core's process",
    }
)


@dataclass(frozen=True)
class Connector:
    """A connector's configuration; ``kv_role`` is added for each side.

    ``names_engines`` adds an ``engine_id``, which a router needs that asks decode while prefill
    computes.  ``streams``: the router asks both at once, and decode follows prefill's request.
    """

    kv_transfer_config: Mapping[str, Any]
    layout: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    names_engines: bool = False
    streams: bool = False


_PDCONN = {
    "kv_connector": "PdconnConnector",
    "kv_connector_module_path": "pdconn.vllm",
}


_OVER_TCP = {"UCX": {"engine_config": "TLS=tcp"}}


def _with(**extra: Any) -> Connector:
    return Connector({**_PDCONN, "kv_connector_extra_config": extra})


_IN_TREE = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
_IN_TREE_PUSH = {"kv_connector": "NixlPushConnector", "kv_buffer_device": "cpu"}
_RESTING = "pdconn.tools.bench.serving.resting"


CONNECTORS: Mapping[str, Connector] = MappingProxyType(
    {
        "in-tree": Connector(_IN_TREE),
        "in-tree-tuned": Connector({**_IN_TREE, "kv_connector_module_path": _RESTING}),
        "in-tree-push": Connector(_IN_TREE_PUSH, names_engines=True),
        "pdconn": Connector(_PDCONN),
        "pdconn-streams": Connector(_PDCONN, streams=True),
        "pdconn-sample": _with(verify="sample"),
        "pdconn-always": _with(verify="always"),
        "pdconn-BLHNC": Connector(_PDCONN, layout="BLHNC"),
        "pdconn-BHLNC": Connector(_PDCONN, layout="BHLNC"),
        "pdconn-tcp": _with(backend_options=_OVER_TCP),
        "pdconn-tcp-ucx": _with(backend_options=_OVER_TCP, transport="ucx"),
    }
)


def engine_specs(names: Sequence[str], model: Path, cores: str) -> list[EngineSpec]:
    """Engines for ``names``, in order: prefill then decode for a connector, else one.

    ``cores`` is a key of ``CORES``.
    """
    return [
        _spec(name, core, role, model, cores)
        for name in names
        for core, role in enumerate(["prefill", "decode"] if name in CONNECTORS else [None])
    ]


def assign_engines(names: Sequence[str], engines: Sequence[_T]) -> list[tuple[str, tuple[_T, ...]]]:
    """The engines of each name; ``engines`` are in the order of ``engine_specs(names)``."""
    left = list(engines)
    assigned = []
    for name in names:
        count = 2 if name in CONNECTORS else 1
        assigned.append((name, tuple(left[:count])))
        del left[:count]
    return assigned


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
    named = {"engine_id": spec.name} if connector.names_engines else {}
    return replace(
        spec,
        kv_transfer_config={**connector.kv_transfer_config, "kv_role": kv_role, **named},
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
