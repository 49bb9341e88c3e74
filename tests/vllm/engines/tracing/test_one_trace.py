"""One request's trace across the proxy, prefill, the pull and decode, exported by each of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.proxy import running_proxy
from tests.forked.engines import running
from tests.router.tracing.otlp_receiver import OtlpReceiver, ReceivedSpan, receiving
from tests.vllm.engines.engines import MAX_TOKENS, Configuration, Expected, cache_beside, engine

pytestmark = pytest.mark.matrix

CONFIGURATION = Configuration("BHLNC", False, one_process=False, policy="fail")
SPANS = {"route", "prefill", "decode", "pdconn.claim", "pdconn.read"}


@dataclass(frozen=True)
class Traced:
    receiver: OtlpReceiver
    proxy: str
    prefill: Client
    decode: Client

    def spans(self, expected: int) -> list[ReceivedSpan]:
        """Spans so far, once there are as many; exporters send them every few seconds."""
        give_up = time.monotonic() + 30.0
        while len(found := self.receiver.spans()) < expected and time.monotonic() < give_up:
            time.sleep(0.1)
        return found


@pytest.fixture(scope="module")
def traced(model: Path, work: Path, expected: Expected) -> Iterator[Traced]:
    del expected  # its engine starts first
    with receiving() as receiver:
        specs = [
            replace(
                made,
                args=(*made.args, "--otlp-traces-endpoint", receiver.endpoint),
                env={
                    **made.env,
                    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                    "OTEL_BSP_SCHEDULE_DELAY": "500",
                },
            )
            for made in (
                engine("traced-prefill", model, CONFIGURATION, "kv_producer", 0),
                engine("traced-decode", model, CONFIGURATION, "kv_consumer", 1),
            )
        ]
        options = ("--otlp-traces-endpoint", receiver.endpoint)
        with running(specs, work, cache=cache_beside(model)) as (prefill, decode):
            urls = [prefill.url], [decode.url]
            with running_proxy(*urls, work, args=options) as url:
                yield Traced(receiver, url, Client(prefill.url), Client(decode.url))


def test_a_trace_shows_route_prefill_claim_read_and_decode(
    traced: Traced, expected: Expected
) -> None:
    (prompt,) = make_prompts([600], seed=61)
    before = len(traced.receiver.spans())
    answer = Client(traced.proxy).complete(prompt, MAX_TOKENS)
    assert expected.mismatches({prompt: answer}) == []
    # The request, what is named above, and vLLM's own of both engines.
    found = traced.spans(before + len(SPANS) + 3)[before:]
    by_name: dict[str, ReceivedSpan] = {span.name: span for span in found}
    (root,) = [span for span in found if not span.parent]
    assert {span.trace for span in found} == {root.trace}
    assert set(by_name) >= SPANS
    parents = {span.span: span.name for span in found}
    assert {name: parents[by_name[name].parent] for name in SPANS} == {
        "route": root.name,
        "prefill": root.name,
        "decode": root.name,
        "pdconn.claim": "decode",
        "pdconn.read": "decode",
    }
    engines = [parents[span.parent] for span in found if span.name == "llm_request"]
    assert sorted(engines) == ["decode", "prefill"]
    claim, read, decode = (by_name[name] for name in ("pdconn.claim", "pdconn.read", "decode"))
    # Other processes' clocks are this machine's; a report is up to a step late.
    assert decode.began_ns - 50_000_000 <= claim.began_ns <= claim.ended_ns <= read.ended_ns
    assert read.ended_ns <= decode.ended_ns
    assert read.attributes["pdconn.bytes"] > 0


def test_a_request_that_nobody_traces_has_no_spans_of_its_pull(
    traced: Traced, expected: Expected
) -> None:
    """Control: it is the request's own trace that the spans above hang from."""
    (prompt,) = make_prompts([500], seed=62)
    before = len(traced.receiver.spans())
    answer = prefill_then_decode(traced.prefill, traced.decode, prompt, MAX_TOKENS)
    assert expected.mismatches({prompt: answer}) == []
    time.sleep(2.0)
    late = traced.receiver.spans()[before:]
    assert not [span for span in late if span.name.startswith("pdconn.")]
