"""Unmodified clients through the proxy: ``openai``, ``anthropic`` and vLLM's benchmark.

Each must be answered as decode answers alone, and by a hand-over: pulls are counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.vllm.engines.engines import PdPair

ONE_PAIR = pytest.mark.only(layout="BHLNC", prefix_caching=True)

NUM_TOKENS = 8
BENCHED = 12
BENCH_SERVE = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve``: the command itself does not run with vLLM's build for CPUs."""


@dataclass(frozen=True)
class Served:
    """A pair, and the URL of a proxy over it."""

    pair: PdPair
    url: str

    def pulls(self) -> float:
        """Pulls of decode until now; counts come with a step."""
        self.pair.decode.complete((5, 6, 7), 1)
        return self.pair.decode.metrics().get("pdconn:pulls_total", 0.0)


@pytest.fixture(scope="module")
def served(pair: PdPair) -> Iterator[Served]:
    with pair.proxy() as url:
        yield Served(pair, url)


def words(first: int, count: int = 120) -> str:
    """A text of ``count`` tokens, another one for each ``first``."""
    return " ".join(f"w{first + n}" for n in range(count))


def openai_completion(url: str, model: str, text: str, **more: Any) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.completions.create(
        model=model, prompt=text, max_tokens=NUM_TOKENS, temperature=0.0, extra_body=more
    )
    return answer.choices[0].text


def openai_chat(url: str, model: str, text: str, **more: Any) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        extra_body=more,
    )
    return answer.choices[0].message.content or ""


def openai_stream(url: str, model: str, text: str, **more: Any) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        stream=True,
        extra_body=more,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def anthropic_message(url: str, model: str, text: str, **more: Any) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    answer = client.messages.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=NUM_TOKENS,
        extra_body={"temperature": 0.0, **more},
    )
    return "".join(block.text for block in answer.content if block.type == "text")


def anthropic_stream(url: str, model: str, text: str, **more: Any) -> str:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with client.messages.stream(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=NUM_TOKENS,
        extra_body={"temperature": 0.0, **more},
    ) as stream:
        return "".join(stream.text_stream)


CLIENTS: tuple[Callable[..., str], ...] = (
    openai_completion,
    openai_chat,
    openai_stream,
    anthropic_message,
    anthropic_stream,
)


@ONE_PAIR
@pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__)
def test_a_client_of_another_project_is_handed_over(
    served: Served, ask: Callable[..., str]
) -> None:
    """The answer, of a prompt that no cache holds, is decode's own."""
    model, text = served.pair.decode.model, words(200 * CLIENTS.index(ask) + 10)
    before = served.pulls()
    seen = ask(served.url, model, text)
    assert served.pulls() == before + 1
    url = served.pair.decode_engine.url
    assert seen == ask(url, model, text)
    assert served.pulls() == before + 1, "decode alone pulls nothing"
    assert seen != ask(url, model, words(11)), "control: another prompt has another answer"


@ONE_PAIR
def test_errors_reach_clients_as_their_own_types(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        openai_chat(served.url, "no-such-model", words(1))
    with pytest.raises(openai.BadRequestError):
        openai_chat(served.url, served.pair.decode.model, words(1), temperature="hot")


@ONE_PAIR
def test_the_edge_cases_of_vllms_own_test_of_its_connector(served: Served) -> None:
    """Less than a block; all of it in decode's cache and none in prefill's; some of it there.

    Source: ``tests/v1/kv_connector/nixl_integration/test_edge_cases.py`` of vLLM, which itself runs
    in ``test_edge_cases.py`` beside this one, where it can be had.
    """
    model, url = served.pair.decode.model, served.pair.decode_engine.url
    prefill = served.pair.prefill_engine.url
    short, whole = words(1900, 3), words(1500, 70)
    assert openai_completion(served.url, model, short) == openai_completion(prefill, model, short)
    primed = openai_completion(url, model, whole)
    assert openai_completion(served.url, model, whole) == primed
    longer = whole + " " + words(1700, 40)
    seen = openai_completion(served.url, model, longer)
    assert seen == openai_completion(prefill, model, longer)


@ONE_PAIR
@pytest.mark.matrix
def test_vllm_bench_serve_measures_hand_overs(served: Served, tmp_path: Path) -> None:
    """Every request of vLLM's own benchmark is handed over, and none fails."""
    before = served.pulls()
    command = [
        *(sys.executable, "-c", BENCH_SERVE),
        *("--backend", "openai", "--base-url", served.url, "--model", served.pair.decode.model),
        *("--tokenizer", str(served.pair.decode_engine.spec.model), "--dataset-name", "random"),
        *("--random-input-len", "300", "--random-output-len", "8", "--num-prompts", str(BENCHED)),
        *("--request-rate", "20", "--ignore-eos", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(tmp_path), "--result-filename", "bench.json"),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (BENCHED, 0)
    assert result["total_output_tokens"] == 8 * BENCHED
    assert served.pulls() >= before + BENCHED
