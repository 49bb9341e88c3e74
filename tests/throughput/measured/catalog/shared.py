"""What entries of several themes need of a machine, and the words that their tables share."""

from __future__ import annotations

from tests.throughput.measured.catalog.entry import Table, package

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
    "in-tree-tuned": "NixlConnector, NIXL's progress thread at rest",
    "in-tree-push": "vLLM's in-tree NixlPushConnector",
    "pdconn": "**pdconn**",
    "pdconn-sample": "pdconn, `verify: sample`",
    "pdconn-always": "pdconn, `verify: always`",
    "pdconn-streams": "pdconn, `--streams on`",
    "pdconn-tcp": "pdconn over TCP",
    "pdconn-tcp-ucx": "pdconn over TCP, `transport: ucx`",
}
SAMPLES = frozenset({"settings", "first_s", "prefill_s", "between_tokens_s"})
"""Of a hand-over's result, what its table does not show."""
HANDOVERS = Table(
    ("handover",),
    "measured",
    {"": "{contestant:s}", "tokens": "{tokens}", "median, ms": "{median_s:ms3}",
     "worst, ms": "{worst_s:ms3}"},
    CONTESTANTS,
)  # fmt: skip
"""The hand-overs of a run called ``handover``, a row for each contestant and length."""
