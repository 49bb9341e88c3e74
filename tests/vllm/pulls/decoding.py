"""A decode engine of vLLM's own scheduler and our workers, whose memory is a table of tokens.

::

    vLLM's scheduler ─► our scheduler's half ─► steps ─► our workers ─► ScriptedPuller
         ▲                                                                 │ as the law draws
         └────────────── reports, joined by vLLM's aggregator ◄────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdconn.protocol.early import EarlyTicket
from pdconn.protocol.ticket import BlockList, Ticket
from pdconn.vllm.prompt import prefix_digest, prompt_digest
from pdconn.vllm.pulls.pulling import Pulling
from tests.fakes.scripted.puller import ScriptedPull, ScriptedPuller
from tests.vllm.patches.known_tokens import KnownTokens, Pass, blocks_of
from tests.vllm.patches.vllm_scheduler import (
    BLOCK_TOKENS,
    Engine,
    KVConnectorOutput,
    KVOutputAggregator,
    ModelRunnerOutput,
    PdWorker,
    Request,
    cache_config,
    engine_config,
    transfer_config,
)

RANKS = 2
LENDER = "lender-boot"


@dataclass(slots=True)
class Asked:
    """A request, and what came of it.

    Attributes:
        is_prefix: its ticket is for a prefix.
        is_early: its ticket is early: it names a stream.
        is_wrong: its ticket is none.
        has_failed: its pull was reported as failed.
        ends: reasons for its end; one in the end.
    """

    name: str
    first: int
    params: dict[str, Any] | None
    is_prefix: bool = False
    is_early: bool = False
    is_wrong: bool = False
    is_aborted: bool = False
    has_failed: bool = False
    ends: list[str] = field(default_factory=list)


class Decoding:
    """One decode engine.

    Args:
        policy: vLLM's ``kv_load_failure_policy``.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        config = _config(policy)
        self.engine = Engine(config)
        self.half = self.engine.connector._scheduler
        self.side: Pulling = self.half.parts.pulling
        self.scheduler = self.engine.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.asked: dict[str, Asked] = {}
        self.memory = KnownTokens(RANKS)
        self.pullers: list[ScriptedPuller] = []
        self._streams: dict[str, Ticket] = {}
        self.workers: list[Any] = []
        for rank in range(RANKS):
            worker: Any = PdWorker(self.half._settings, config, cache_config())
            write = lambda pull, rank=rank: self._write(rank, pull)  # noqa: E731
            puller = ScriptedPuller(rank, write, self._ticket_of)
            worker._puller, worker._rank = puller, rank
            self.pullers.append(puller)
            self.workers.append(worker)
        self._aggregator = KVOutputAggregator(RANKS)
        self._tickets: dict[str, int] = {}
        self._children = 0

    @property
    def passes(self) -> list[list[Pass]]:
        """Steps in flight."""
        return self.memory.passes

    # Requests

    def prompt(self, first: int, num_tokens: int) -> Any:
        """A request of vLLM's for a prompt, under no name that is used."""
        return self._request("prompt", first, num_tokens, None)

    def _request(self, name: str, first: int, num_tokens: int, params: Any) -> Any:
        extra = {"kv_transfer_params": params} if params else None
        sampling = self.engine.sampling(extra_args=extra)
        tokens = list(range(first, first + num_tokens))
        return Request(name, tokens, sampling, None, block_hasher=self.engine._hasher)

    def ticket(self, first: int, num_tokens: int, *, is_prefix: bool = False) -> Ticket:
        """A ticket of another engine's, for ``num_tokens`` tokens of a prompt."""
        name = f"lent-{len(self._tickets)}"
        self._tickets[name] = first
        of = self.prompt(first, num_tokens)
        digest = prefix_digest(of, num_tokens) if is_prefix else prompt_digest(of)
        blocks = BlockList(0, tuple(range(1, 1 + -(-num_tokens // BLOCK_TOKENS))))
        return Ticket("p", LENDER, name, "localhost", 5600, num_tokens, digest, (blocks,))

    def early_ticket(self, first: int, num_tokens: int) -> EarlyTicket:
        """An early ticket for a prompt, which another engine begins to compute."""
        made = self.ticket(first, num_tokens)
        stream = f"{len(self._streams):016}"
        self._streams[stream] = made
        return EarlyTicket.like(made.to_params(1, 1), stream)

    def _ticket_of(self, given: Ticket | EarlyTicket) -> Ticket:
        return given if isinstance(given, Ticket) else self._streams[given.stream]

    def arrive(self, name: str, first: int, num_tokens: int, **asked: Any) -> None:
        """A request comes; ``asked`` are further fields of :class:`Asked`."""
        one = self.asked[name] = Asked(name, first, **{"params": None, **asked})
        request = self._request(name, first, num_tokens, one.params)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Its client has left."""
        self.asked[name].is_aborted = True
        self.engine.abort(name)

    # Steps

    def schedule(self) -> None:
        """One step more is in flight."""
        self.engine.schedule()
        step = self.engine.in_flight[-1]
        self.memory.begin_step(self.scheduler, step)
        for worker, puller in zip(self.workers, self.pullers, strict=True):
            worker.bind_connector_metadata(step.kv_connector_metadata)
            for name, pull in puller.pulls.items():
                is_useless = self.asked[name].is_aborted
                assert pull.is_cancelled or not is_useless, f"{name} has left, and is pulled"

    def process(self) -> None:
        """The oldest step runs, and every rank reports."""
        self.memory.end_step()
        outputs: list[Any] = []
        for worker in self.workers:
            worker.wait_for_save()
            results = worker.get_transfer_results()
            for name in results.failed_recving:
                self.asked[name].has_failed = True
            made = KVConnectorOutput(
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=made))
        joined: Any = self._aggregator.aggregate(outputs)
        for answer in self.engine.process(joined.kv_connector_output):
            if answer.finish_reason is not None:
                self.asked[answer.request_id].ends.append(str(answer.finish_reason))

    def blocks(self, name: str) -> tuple[int, ...]:
        """Blocks that a request has now, by their place."""
        return blocks_of(self.scheduler, name)

    def close(self) -> None:
        """End what it has of threads."""
        self.engine.close()

    def _write(self, rank: int, pull: ScriptedPull) -> None:
        """A read has brought what its ticket is for."""
        assert pull.need is not None
        [tokens], [blocks] = pull.need.tokens, pull.need.blocks
        first = self._tickets[self._ticket_of(pull.claim.ticket).request_id]
        for at in tokens:
            block = blocks.ids[at // BLOCK_TOKENS - blocks.first]
            self.memory.write(rank, (block, at % BLOCK_TOKENS), (first, at))


_CONFIGS: dict[str, Any] = {}


def _config(policy: str) -> Any:
    """Of an engine of two ranks; made once, since it takes vLLM long."""
    if policy not in _CONFIGS:
        made = engine_config(transfer_config("kv_consumer", policy=policy))
        made.parallel_config.tensor_parallel_size = RANKS
        _CONFIGS[policy] = made
    return _CONFIGS[policy]
