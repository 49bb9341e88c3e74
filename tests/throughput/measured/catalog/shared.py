"""What entries of several themes need of a machine, and the words that their tables share."""

from __future__ import annotations

from tests.throughput.measured.catalog.entry import package

NIXL = package("nixl")
UCXX = package("ucxx")
ENGINE = package("vllm")
ENGINES = {"packages": ("vllm", "nixl"), "needs": (ENGINE, NIXL)}
PATHS = {
    "shm-huge": "CMA, huge pages",
    "shm": "CMA, 4 KiB pages",
    "tcp": "TCP on loopback",
    "tcp-ucx": "the same, `transport: ucx`",
}
CONTESTANTS = {
    "alone": "one engine alone",
    "single": "one engine alone",
    "in-tree": "vLLM's in-tree NixlConnector",
    "pdconn": "**pdconn**",
    "pdconn-sample": "pdconn, `verify: sample`",
    "pdconn-always": "pdconn, `verify: always`",
    "pdconn-tcp": "pdconn over TCP",
    "pdconn-tcp-ucx": "pdconn over TCP, `transport: ucx`",
}
SAMPLES = frozenset({"settings", "first_s", "prefill_s", "between_tokens_s"})
"""Of a hand-over's result, what its table does not show."""
