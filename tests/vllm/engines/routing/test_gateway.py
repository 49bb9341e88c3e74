"""A real Envoy over ``pdconn picker`` and a pair of engines: each request is pulled, and right."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from pdconn.tools.lab.compare_answers import make_prompts
from pdconn.tools.lab.lab_client import Client
from pdconn.tools.lab.proxy import running_proxy
from tests.router.picker.gateway import BUFFERED, MODES, Filter, running_envoy
from tests.vllm.engines.engines import MAX_TOKENS, Expected, PdPair

pytestmark = pytest.mark.only(layout="BHLNC", prefix_caching=True)


@contextmanager
def gateway(pair: PdPair, shape: Filter) -> Iterator[str]:
    """Envoy over a picker over the pair; its URL."""
    urls, work = (pair.prefill_engine.url, pair.decode_engine.url), pair.decode_engine.log.parent
    with running_proxy([urls[0]], [urls[1]], work, command="picker") as picker:
        port = int(picker.rpartition(":")[2])
        with running_envoy(port, [urls[1]], shape) as url:
            yield url


@pytest.mark.parametrize("mode", MODES)
def test_each_request_is_pulled_and_right(pair: PdPair, expected: Expected, mode: str) -> None:
    prompts = make_prompts([40, 100, 300, 700] * 4, seed=391 + len(mode))
    before = pair.decode.metrics().get("pdconn:pulls_total", 0.0)
    with gateway(pair, Filter(mode)) as url, ThreadPoolExecutor(8) as pool:
        client = Client(url)
        streamed = [pool.submit(client.stream, one, MAX_TOKENS) for one in prompts[:8]]
        whole = [pool.submit(client.complete, one, MAX_TOKENS) for one in prompts[8:]]
        answers = dict(zip(prompts[8:], (one.result() for one in whole), strict=True))
        assert expected.mismatches(answers) == []
        for prompt, one in zip(prompts[:8], streamed, strict=True):
            assert one.result().answer.tokens == expected[prompt].tokens
    assert pair.decode.metrics()["pdconn:pulls_total"] - before == len(prompts)
    assert pair.lent_after_one_more() == 0.0


def test_without_its_picker_a_gateway_lets_decode_compute(pair: PdPair, expected: Expected) -> None:
    """The control: nothing is pulled then, and the answers are right."""
    prompts = make_prompts([100] * 4, seed=397)
    before = pair.decode.metrics().get("pdconn:pulls_total", 0.0)
    nobody = running_envoy(1, [pair.decode_engine.url], Filter(BUFFERED, fails_open=True))
    with nobody as url:
        answers = {one: Client(url).complete(one, MAX_TOKENS) for one in prompts}
    assert expected.mismatches(answers) == []
    assert pair.decode.metrics().get("pdconn:pulls_total", 0.0) == before
