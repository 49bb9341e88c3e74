"""What the connector does on the engine's thread: nothing that waits, nothing that grows.

Both halves of decode take steps as vLLM has them take, against a real lender and a real
puller.  Processor time and ratios in one run only; the milliseconds are for
``python -m tests.throughput.engine_thread``.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from pdconn.protocol.ticket import BlockList, Ticket, parse_ticket
from pdconn.vllm.config import read_settings
from pdconn.vllm.prompt import prompt_digest
from pdconn.vllm.pulls.pull_rules import PullRules
from pdconn.vllm.pulls.pulling import Pulling
from tests.fakes.pair import NUM_BLOCKS, Pair
from tests.fakes.simulated.hooks import allocated, matched
from tests.fakes.simulated.requests import vllm_request
from tests.threads.inside import num_open
from transport.testing.inprocess.faults import Held
from transport.testing.inprocess.transport import InProcessNetwork

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pdconn.vllm.metadata import PdMetadata
    from pdconn.vllm.worker import PdWorker

PROMPT = list(range(4, 17))
MANY = 32
_PATIENCE_S = 30.0
_STEPS = 300
_ROUNDS = 3


def request(name: str, port: int) -> Any:
    """A decode request with a ticket of its own name, from the lender at ``port``."""
    made = vllm_request(
        request_id=name,
        prompt_token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_tokens=len(PROMPT),
        lora_request=None,
        mm_features=[],
    )
    ids = tuple(1 + (int(name[1:]) + n) % (NUM_BLOCKS - 1) for n in range(4))
    ticket = Ticket(
        "prefill", "boot-1", name, "127.0.0.1", port,
        len(PROMPT), prompt_digest(made), (BlockList(0, ids),),
    )  # fmt: skip
    made.kv_transfer_params = ticket.to_params(1, 1)
    return made


class Decode:
    """The scheduler's half and a worker's half of decode, on one thread, as one engine."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._consumer = Pulling(PullRules("here", False, True, max_model_len=1 << 20))
        # A worker takes its puller from its engine's memory; here there is no engine.
        self._worker: Any = PdWorker(read_settings({}, "127.0.0.1", 1, 0), None, None)  # type: ignore[arg-type]
        self._worker._puller = pair.puller
        self._numbers = iter(range(1 << 20))
        self.received: set[str] = set()
        self.failed: set[str] = set()

    def requests(self, count: int) -> list[Any]:
        """New ones, lent by the lender."""
        made = [request(f"r{next(self._numbers)}", self._pair.lender.port) for _ in range(count)]
        for each in made:
            ticket = parse_ticket(each.kv_transfer_params)
            self._pair.lender.lend(each.request_id, ticket.digest(), 60.0)
        return made

    def step(self, new: list[Any] | None = None) -> None:
        """One step that computes something, in which ``new`` requests arrive."""
        for request in new or ():
            self._consumer.on_new_request(request)
            count, _ = matched(self._consumer, request, 0)
            allocated(self._consumer, request, ([1, 2, 3, 4],), count or 0)
        self._worker.bind_connector_metadata(PdMetadata(self._consumer.take_commands()))
        results = self._worker.get_transfer_results()
        self._worker.build_connector_worker_meta()
        self._worker.take_stats()
        for request_id in results.finished_recving:
            self._consumer.end_pull(request_id)
        self.received |= results.finished_recving - results.failed_recving
        self.failed |= results.failed_recving

    def step_until(self, count: int) -> None:
        """Take steps until ``count`` pulls are reported."""
        give_up = time.monotonic() + _PATIENCE_S
        while len(self.received) + len(self.failed) < count:
            assert time.monotonic() < give_up, f"{len(self.received)} of {count} were received"
            self.step()
            time.sleep(0.001)


@contextmanager
def in_flight(count: int) -> Iterator[Decode]:
    """Decode with ``count`` pulls whose reads do not move; they are received in the end."""
    network = InProcessNetwork(script=lambda _: Held())
    with Pair(network=network, claim_timeout_s=_PATIENCE_S) as pair:
        decode = Decode(pair)
        decode.step(decode.requests(count))
        give_up = time.monotonic() + _PATIENCE_S
        while not network.in_flight or num_open(pair.puller) < 2 * count:
            assert time.monotonic() < give_up, "nothing is read"
            time.sleep(0.002)
        try:
            yield decode
            assert not decode.received
        finally:
            network.script = None
            network.release_held()
        decode.step_until(count)
        assert not decode.failed


def least_s(decode: Decode, clock: Any = time.thread_time) -> float:
    """The least time of a step in which nothing happens."""
    took = []
    gc.collect()
    gc.disable()
    for _ in range(_STEPS):
        began = clock()
        decode.step()
        took.append(clock() - began)
    gc.enable()
    return min(took)


class Scanning(Pulling):
    """As one that looks through all requests when one arrives."""

    def on_new_request(self, request: Any) -> None:
        for tracked in self._tracked.values():
            assert tracked.follows is None
        super().on_new_request(request)


def arriving_s(count: int, kind: type[Pulling] = Pulling, rounds: int = _ROUNDS) -> float:
    """The least processor time that the scheduler's half takes for a request, of ``count``."""
    took = []
    for _ in range(rounds):
        side = kind(PullRules("here", False, True, max_model_len=1 << 20))
        requests = [request(f"r{number}", 5600) for number in range(count)]
        gc.collect()
        gc.disable()
        began = time.thread_time()
        for each in requests:
            side.on_new_request(each)
            matched(side, each, 0)
            allocated(side, each, ([1, 2, 3, 4],), len(PROMPT) - 1)
        side.take_commands()
        for each in requests:
            side.end_pull(each.request_id)
        took.append((time.thread_time() - began) / count)
        gc.enable()
        assert len(side) == 0
    return min(took)


def least_ratio(ratio: Callable[[], float], enough: float) -> float:
    """The least of up to three, of which a busy machine spoils some; less is not looked for."""
    least = ratio()
    for _ in range(2):
        least = least if least < enough else min(least, ratio())
    return least


def test_a_step_costs_no_more_because_of_pulls_that_wait() -> None:
    with in_flight(1) as one, in_flight(8 * MANY) as many:
        assert least_ratio(lambda: least_s(many) / least_s(one), 2) < 2


def test_a_request_costs_no_more_because_of_others_that_arrive_with_it() -> None:
    def ratio(kind: type[Pulling]) -> float:
        return arriving_s(256 * MANY, kind, rounds=1) / arriving_s(16 * MANY)

    assert least_ratio(lambda: ratio(Pulling), 2) < 2
    assert ratio(Scanning) > 2  # the control


def test_no_step_waits_for_a_pull() -> None:
    """Waiting is time on the wall that is no processor time."""
    with in_flight(MANY) as decode:
        assert least_ratio(lambda: least_s(decode, time.perf_counter) / least_s(decode), 3) < 3


def test_the_puller_is_woken_once_for_all_that_is_posted_before_it_looks() -> None:
    """Each further byte would let go of the interpreter's lock."""
    with Pair() as pair:
        decode = Decode(pair)
        inbox: Any = pair.puller._inbox
        written: list[bytes] = []
        poke, inbox._poke = inbox._poke, SimpleNamespace(send=written.append)
        inbox._poked = False
        try:
            decode.step(decode.requests(MANY))
        finally:
            inbox._poke = poke
            inbox._poked = False
            inbox.wake()
        decode.step_until(MANY)
        assert not decode.failed
        assert written == [b"\0"]
