"""The access log with digests of prompts: what ``pdconn plan --trace`` reads."""

from __future__ import annotations

import json
import logging

import pytest

from pdconn.router.prefix.block_digests import decode_blocks
from pdconn.tools.cli.proxy.proxy_logs import JsonFormatter
from pdconn.tools.plan.store.curve import TracedRequest
from pdconn.tools.plan.store.trace import TraceCounts, read_trace
from tests.fakes.event_loop import in_loop
from tests.fakes.routed import fleet

LONG = list(range(1, 1101))
PARTED = LONG[:600] + list(range(5000, 5500))


def logged(caplog: pytest.LogCaptureFixture, **settings: bool) -> list[bytes]:
    """The lines of two prompts that part after 600 tokens, and of one that is not looked up."""
    caplog.set_level(logging.INFO, logger="pdconn.access")

    @in_loop
    async def scene() -> None:
        async with fleet(**settings) as made:
            await made.pods[made.prefill[0].url].store(LONG[:320])
            await made.events_applied()
            await made.ask(LONG)
            await made.ask(PARTED)
            await made.send("/v1/models", method="GET")

    scene()
    form = JsonFormatter()
    return [form.format(r).encode() for r in caplog.records if r.name == "pdconn.access"]


def test_a_logged_prompt_is_a_request_of_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    counts = TraceCounts()
    first, second = read_trace(logged(caplog, log_blocks=True), counts)
    assert (first.num_tokens, second.num_tokens) == (1100, 1100)
    assert (first.block_tokens, len(first.ids), len(second.ids)) == (256, 4, 4)
    shared = [a == b for a, b in zip(first.ids, second.ids, strict=True)]
    assert shared == [True, True, False, False], "600 tokens are two blocks and a part"
    assert counts == TraceCounts(lines=3, skipped=1)


def test_without_the_option_the_log_says_nothing_of_prompts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = logged(caplog)
    assert not any("prompt_blocks" in json.loads(line) for line in lines)
    counts = TraceCounts()
    found: list[TracedRequest] = list(read_trace(lines, counts))
    assert (found, counts.skipped) == ([], 3)


@pytest.mark.parametrize("text", ["", "256", "256:", "0:", "256:xyz", "256:00000000000", "-1:"])
def test_other_texts_are_refused(text: str) -> None:
    if text == "256:":
        assert decode_blocks(text) == (256, []), "the control: a prompt of no whole block"
        return
    with pytest.raises(ValueError, match="12 hexadecimal digits"):
        decode_blocks(text)
