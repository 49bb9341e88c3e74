"""vLLM's NixlConnector with a sleeping NIXL progress thread: a contestant of benchmarks.

NIXL's Python agent sets the delay of its progress thread to 0, so that the thread spins: on a
machine with two cores it takes one of them from the model.  Here every agent of the process gets
pdconn's default delay, in the one constructor through which all agents are made.  The connector is
otherwise unchanged, so a comparison shows the difference between the connectors.

Engines load this module by ``kv_connector_module_path``; no other module imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import nixl._bindings as bindings
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

PROGRESS_DELAY_US = 5000
"""The default of ``transport.nixl.transport.NixlTransport``; a test compares the two."""


def resting(make: Callable[..., Any]) -> Callable[..., Any]:
    """``nixlAgent`` with a progress thread that sleeps until an event wakes it."""

    @functools.wraps(make)
    def made(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return make(name, config)

    return made


bindings.nixlAgent = resting(bindings.nixlAgent)

__all__ = ["NixlConnector"]
