"""Requests to the router while something happens to it, and what became of each."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from pdconn.router.openai.event_stream import DONE, event_data
from pdconn.tools.lab.compare_answers import Answer, make_prompts, spread_lengths
from pdconn.tools.lab.lab_client import answer_of
from pdconn.tools.openai.completions import Completion, completion_request, read_completion
from tests.project.docker.fleet.containers import MODEL

Prompt = tuple[int, ...]

MAX_TOKENS = 16
"""Enough that some streams are open whenever an engine or the router is killed."""
_TIMEOUT_S = 120.0
_CONNECT_FOR_S = 90.0
_PAUSE_S = 0.2
"""Between two requests of a client: the engines that restart need the cores, too."""


@dataclass(frozen=True)
class Sent:
    """A request, and how it ended.

    Attributes:
        seconds: from sending it to its end.
        answer: all that came, if the answer is whole.
        problem: why there is none.
        cut: the connection broke after it had been accepted.
        began: a first token had come.
    """

    prompt: Prompt
    seconds: float
    answer: Answer | None = None
    problem: str | None = None
    cut: bool = False
    began: bool = False


def send(url: str, prompt: Prompt, max_tokens: int = MAX_TOKENS) -> Sent:
    """Ask for a streamed answer, whatever becomes of it.

    While nothing listens, connecting is tried again: such a request was never accepted.
    """
    chunks: list[Completion] = []
    connection = _connected(url)
    began = time.monotonic()
    problem, cut = None, False
    try:
        problem = _read(connection, prompt, max_tokens, chunks)
    except (OSError, http.client.HTTPException) as failure:
        problem, cut = f"{type(failure).__name__}: {failure}", True
    finally:
        connection.close()
    seconds = time.monotonic() - began
    if problem is not None:
        return Sent(prompt, seconds, problem=problem, cut=cut or bool(chunks), began=bool(chunks))
    return Sent(prompt, seconds, answer_of(chunks), began=True)


def _connected(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    give_up = time.monotonic() + _CONNECT_FOR_S
    while True:
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port or 80, timeout=_TIMEOUT_S
        )
        try:
            connection.connect()
        except OSError:
            connection.close()
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)
        else:
            return connection


def _read(
    connection: http.client.HTTPConnection,
    prompt: Prompt,
    max_tokens: int,
    chunks: list[Completion],
) -> str | None:
    """Fill ``chunks`` with what has tokens; what is wrong with the answer, or None."""
    body = completion_request(
        MODEL, prompt, max_tokens, logprobs=5, return_tokens_as_token_ids=True, stream=True
    )
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        return f"{response.status}: {response.read()[:300].decode(errors='replace')}"
    done = False
    for line in response:
        data = event_data(line)
        if data is None:
            continue
        if data == DONE:
            done = True
            continue
        event = read_completion(data)
        if event.reported_error is not None:
            return f"in the stream: {event.reported_error[:300]}"
        if event.choices and event.choices[0].token_ids:
            chunks.append(event)
        if event.choices and event.choices[0].finish_reason == "abort":
            return "the engine has ended the request"
    if not done:
        return "the stream ended without [DONE]"
    return None if chunks else "the stream has no token"


class Traffic:
    """Clients that ask one request after the other for as long as the block runs."""

    def __init__(self, url: str, seed: int, clients: int = 3, longest: int = 700) -> None:
        self.sent: list[Sent] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(fresh(400, longest, seed * 100 + n),))
            for n in range(clients)
        ]

    def _ask(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if self._stop.is_set():
                return
            self.sent.append(send(self._url, prompt))
            self._stop.wait(_PAUSE_S)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def fresh(count: int, longest: int, seed: int) -> list[Prompt]:
    """Prompts of mixed lengths, none of which begins like another."""
    return make_prompts(spread_lengths(count, longest, seed, edges=[32, 64]), seed=seed)
