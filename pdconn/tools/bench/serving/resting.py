"""vLLM's NixlConnector with NIXL's progress thread at rest: a contestant of benchmarks.

NIXL's Python agent gives its progress thread a delay of 0, so that the thread spins: on a machine
with two cores it takes one of them from the model.  Here every agent of the process gets the delay
that pdconn's own has by default, in the one call that all agents are made by.  Nothing else
of the connector is changed, so a comparison shows what the connectors themselves do.

Engines load this by ``kv_connector_module_path``; nothing of the product imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import nixl._bindings as bindings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

PROGRESS_DELAY_US = 5000
"""As ``transport.nixl.transport.NixlTransport`` has it by default, which a test compares."""


def resting(make: Callable[..., Any]) -> Callable[..., Any]:
    """``nixlAgent`` for agents whose progress thread sleeps until an event wakes it."""

    @functools.wraps(make)
    def made(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make(name, config)

    return made


bindings.nixlAgent = resting(bindings.nixlAgent)

__all__ = ["NixlConnector"]
