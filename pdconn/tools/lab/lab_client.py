"""A blocking HTTP client of vLLM's OpenAI server; use a thread for each request at once.

``prefill_then_decode`` does the same as the proxy in vLLM's examples: it passes
``kv_transfer_params`` unparsed from one engine to the other.
"""

from __future__ import annotations

import http.client
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.samples import Sample

from pdconn.protocol.early import EarlyTicket
from pdconn.router.fleet.prometheus_page import all_samples
from pdconn.router.openai.bodies import lend_params
from pdconn.router.openai.event_stream import DONE, event_data
from pdconn.tools.lab.compare_answers import Answer
from pdconn.tools.lab.lab_errors import RequestRefused
from pdconn.tools.lab.spec import SERVED_NAME
from pdconn.tools.openai.completions import (
    BrokenAnswer,
    Completion,
    CompletionChoice,
    Logprobs,
    completion_request,
    read_completion,
)

tickets_seen: dict[str, Mapping[str, Any]] | None = None
"""A ticket of each prefill engine, by its URL: :func:`prefill_then_decode` asks both engines at
once where there is one.  None: one after the other, always."""


@dataclass(frozen=True)
class Timed:
    """An answer, and the seconds from sending the request to its tokens.

    ``sent_s`` is the time of sending, by ``time.perf_counter``.
    """

    answer: Answer
    first_token_s: float
    last_token_s: float
    sent_s: float = 0.0


class Client:
    """Client of one OpenAI-compatible server of vLLM.

    Every call opens its own connection, so many threads may share a client.
    """

    def __init__(self, url: str, timeout_s: float = 300.0, model: str = SERVED_NAME) -> None:
        parts = urlsplit(url)
        self.url = url
        self.model = model
        self._address = (parts.hostname or "localhost", parts.port or 80)
        self._timeout_s = timeout_s

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        kv_transfer_params: Mapping[str, Any] | None = None,
        top: int = 5,
        **more: Any,
    ) -> Answer:
        """Continue ``prompt`` greedily by exactly ``max_tokens`` tokens."""
        body = self._body(prompt, max_tokens, kv_transfer_params, top, more)
        return answer_of([read_completion(self._post("/v1/completions", body))])

    def stream(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        kv_transfer_params: Mapping[str, Any] | None = None,
        top: int = 1,
        **more: Any,
    ) -> Timed:
        """``complete`` with streaming, timed from just before the request is sent."""
        body = self._body(prompt, max_tokens, kv_transfer_params, top, more) | {"stream": True}
        payload = json.dumps(body)  # before the clock starts
        chunks: list[Completion] = []
        first = 0.0
        with self._connection() as connection:
            began = time.perf_counter()
            for chunk in _events(self._send(connection, "/v1/completions", payload)):
                if not chunks:
                    first = time.perf_counter() - began
                chunks.append(chunk)
            last = time.perf_counter() - began
        return Timed(answer_of(chunks), first, last, began)

    def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send JSON, get JSON.

        Raises:
            RequestRefused: the status is not 200.
        """
        return dict(json.loads(self._post(path, body)))

    def get_text(self, path: str) -> str:
        """Get text.

        Raises:
            RequestRefused: the status is not 200.
        """
        with self._connection() as connection:
            return self._send(connection, path, None).read().decode()

    def metrics(self) -> dict[str, float]:
        """Samples of ``/metrics``, summed over their labels, by name."""
        return _summed(all_samples(self.get_text("/metrics")))

    def free_blocks(self) -> int:
        """Free KV blocks at the engine's last step.

        vLLM updates this when it steps: blocks that became free without a step show only after one
        more request.
        """
        samples = all_samples(self.get_text("/metrics"))
        counts = (sample.labels.get("num_gpu_blocks", "") for sample in samples)
        blocks = next(filter(str.isdecimal, counts), None)
        if blocks is None:
            raise ValueError(f"{self.url}/metrics has no label num_gpu_blocks")
        usable = int(blocks) - 1  # block 0 is the null block
        return round(usable * (1.0 - _summed(samples)["vllm:kv_cache_usage_perc"]))

    def _body(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None,
        top: int,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        body = completion_request(
            self.model,
            prompt,
            max_tokens,
            logprobs=top,
            return_tokens_as_token_ids=True,  # keys of top_logprobs become "token_id:7"
        )
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = dict(kv_transfer_params)
        return body | dict(more)

    def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        with self._connection() as connection:
            return self._send(connection, path, json.dumps(body)).read()

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(*self._address, timeout=self._timeout_s)
        try:
            yield connection
        finally:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, path: str, payload: str | None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if payload is not None else {}
        connection.request("GET" if payload is None else "POST", path, payload, headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            body = response.read().decode(errors="replace")
            raise RequestRefused(self.url + path, response.status, body)
        return response


def prefill_then_decode(
    prefill: Client, decode: Client, prompt: Sequence[int], max_tokens: int = 16, **more: Any
) -> Answer:
    """The answer of ``decode`` to a prompt that ``prefill`` computed.

    ``more`` is sent to the decode engine only.  See :data:`tickets_seen`.
    """
    like = None if tickets_seen is None else tickets_seen.get(prefill.url)
    if like is not None:
        answer, ticket = ask_both(prefill, decode, prompt, max_tokens, like=like, **more)
        _saw_ticket(prefill, ticket)
        return answer
    ticket = prefill_only(prefill, prompt)
    _saw_ticket(prefill, ticket)
    return decode.complete(prompt, max_tokens, kv_transfer_params=ticket, **more)


def _saw_ticket(prefill: Client, ticket: Mapping[str, Any] | None) -> None:
    # The newest: an engine that has started again, or another one at its port, is another boot.
    if tickets_seen is not None and ticket is not None:
        tickets_seen[prefill.url] = ticket


def prefill_only(
    prefill: Client, prompt: Sequence[int], source: Mapping[str, Any] | None = None
) -> Mapping[str, Any] | None:
    """Compute a prompt on ``prefill``; returns the ticket for the decode engine, unparsed.

    None if the engine has no connector.  ``source``: a ticket for a prefix of the prompt, from
    :func:`lend_prefix`.
    """
    params = {**lend_params(), **({"pdconn": {"from": source}} if source else {})}
    return prefill.complete(prompt, 1, kv_transfer_params=params).kv_transfer_params


def lend_prefix(
    holder: Client, prompt: Sequence[int], num_tokens: int, **more: Any
) -> Mapping[str, Any] | None:
    """Request the first ``num_tokens`` tokens of a prompt: a ticket, or how much is held."""
    params = {**lend_params(), "pdconn": {"lend": num_tokens}}
    asked = holder.complete(prompt[: num_tokens + 1], 1, kv_transfer_params=params, **more)
    return asked.kv_transfer_params


def _summed(samples: Sequence[Sample]) -> dict[str, float]:
    """Samples summed over their labels, by name."""
    totals: dict[str, float] = {}
    for sample in samples:
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _events(response: http.client.HTTPResponse) -> Iterator[Completion]:
    """The server-sent events that have tokens."""
    for line in response:
        data = event_data(line)
        if data is None or data == DONE:
            continue
        event = read_completion(data)
        if event.reported_error is not None:
            raise RequestRefused("stream", http.HTTPStatus.OK, data.decode(errors="replace"))
        if event.choices and event.choices[0].token_ids:
            yield event


def answer_of(completions: Sequence[Completion]) -> Answer:
    """Join a whole answer, or the chunks of a streamed one.

    Raises:
        BrokenAnswer: one has no choice, or neither token ids nor log-probabilities.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    top: list[Mapping[int, float]] = []
    finish_reason = ticket = None
    for completion in completions:
        choice = completion.choices[0] if completion.choices else CompletionChoice()
        found = choice.logprobs or Logprobs()
        if choice.token_ids is None or found.token_logprobs is None or found.top_logprobs is None:
            raise BrokenAnswer("expected token ids and log-probabilities in each chunk")
        tokens += choice.token_ids
        logprobs += found.token_logprobs
        top += [_by_id(position or {}) for position in found.top_logprobs]
        finish_reason, ticket = choice.finish_reason, completion.kv_transfer_params
    return Answer(tuple(tokens), tuple(logprobs), tuple(top), finish_reason, ticket)


def _by_id(position: Mapping[str, float]) -> dict[int, float]:
    return {int(token.removeprefix("token_id:")): value for token, value in position.items()}


def ask_both(
    prefill: Client,
    decode: Client,
    prompt: Sequence[int],
    max_tokens: int = 16,
    *,
    like: Mapping[str, Any],
    head_start_s: float = 0.0,
    **more: Any,
) -> tuple[Answer, Mapping[str, Any] | None]:
    """As :func:`prefill_then_decode`, but both are asked at once, with a stream.

    Args:
        like: an earlier ticket of ``prefill``, which says where it lends.
        head_start_s: of prefill before decode; negative for one of decode.
        more: is sent to the decode engine only.

    Returns:
        Decode's answer, and prefill's ticket.
    """
    early = EarlyTicket.like(like, secrets.token_hex(16))
    params = {**lend_params(), "pdconn": {"stream": early.stream}}

    def prefilled() -> Mapping[str, Any] | None:
        time.sleep(max(0.0, -head_start_s))
        return prefill.complete(prompt, 1, kv_transfer_params=params).kv_transfer_params

    with ThreadPoolExecutor(1) as other:
        ticket = other.submit(prefilled)
        time.sleep(max(0.0, head_start_s))
        early_params = early.to_params()
        answer = decode.complete(prompt, max_tokens, kv_transfer_params=early_params, **more)
        return answer, ticket.result()
