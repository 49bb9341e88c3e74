"""An engine in virtual time whose scheduler is vLLM's own, and whose connector is ours.

::

    client ── add_request ──► vLLM's Scheduler ── hooks ──► PdconnConnector (scheduler side)
                                 │ schedule(), every step             │ metadata: commands
                                 ▼                                    ▼
                              KV blocks are written             Pulls of one rank, SimLender

Made up are time, the model (what it writes and samples follows from a prompt's number), and the
threads.  A prompt's number is the high part of its tokens, so that prompts of one number share
their beginnings as turns of one conversation do.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.protocol.ticket import Ticket
from pdconn.puller.commands import ClaimTicket, Command
from pdconn.puller.thread import PullResults
from pdconn.puller.verification import Verify
from pdconn.vllm.blocks.splits import UNSPLIT
from pdconn.vllm.metadata import PdWorkerReport
from pdconn.vllm.scheduler import PdScheduler
from pdconn.vllm.stats import PdStats
from tests.fakes.simulated.inspection import inspected_here
from tests.simulation.decode import DecodeRank
from tests.simulation.memory import BLOCK_TOKENS
from tests.simulation.prefill import TRAITS
from tests.simulation.whole.lender import SimLender
from tests.simulation.world import Machine, Wire, World

STEP_S, TOKEN_S, IDLE_S = 0.002, 0.0005, 0.01
"""A step, each token that it computes, and a step without any."""
LENGTH = 1 << 12
"""Of the tokens of one number; also the longest prompt."""

Answered = Callable[[dict[str, Any] | None, list[int]], None]
"""Gets the answer's ``kv_transfer_params`` and its tokens."""


@dataclass
class Asked:
    """A request in the engine."""

    number: int
    request: Request
    answered: Answered


@dataclass
class Pulled:
    """What a rank's log asks of a request that pulls."""

    ticket: Ticket
    pull: str


@cache
def _config() -> VllmConfig:
    folder = Path(__file__).parent / "model"
    transfer = KVTransferConfig(
        kv_connector="PdconnConnector",
        kv_connector_module_path="pdconn.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    args = EngineArgs(
        str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=LENGTH,
        kv_transfer_config=transfer, max_num_batched_tokens=64, max_num_seqs=32,
        async_scheduling=False, disable_log_stats=True, prefix_caching_hash_algo="sha256_cbor",
    )  # fmt: skip
    with inspected_here():
        made: VllmConfig = args.create_engine_config()
    made.cache_config.block_size = BLOCK_TOKENS
    init_none_hash(_hash)
    return made


class Engine:
    """One engine of ``num_blocks`` blocks that lends and pulls, one of ``engines`` by port."""

    def __init__(
        self,
        world: World,
        number: int,
        engines: dict[int, Any],
        *,
        num_blocks: int,
        policy: str,
    ) -> None:
        self.world, self.number, self.name = world, number, f"engine{number}"
        self.machine = Machine(world)
        self.port = 7000 + number
        self.lenders = engines
        self.requests: dict[str, Pulled] = {}
        self.freed_at: dict[Ticket, float] = {}
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.num_steps = 0
        self._asked: dict[str, Asked] = {}
        self._numbers = itertools.count()
        self._pulled: list[PullResults] = []
        self._is_stepping = self._is_idle = False
        engines[self.port] = self
        config = copy.copy(_config())
        config.kv_transfer_config = transfer = copy.copy(config.kv_transfer_config)
        transfer.kv_load_failure_policy = policy
        transfer.engine_id = self.name
        transfer.kv_connector_extra_config = {"side_channel_port": self.port}
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=2, head_size=1, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["a", "b"], spec)]
        self.scheduler = Scheduler(
            config, KVCacheConfig(num_blocks, [], groups), _Unstructured(),
            BLOCK_TOKENS, BLOCK_TOKENS, log_stats=False,
        )  # fmt: skip
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, _hash)
        self.rank = DecodeRank(
            world,
            self,
            0,
            1,
            False,
            num_blocks=num_blocks,
            verify=Verify.OFF,  # type: ignore[arg-type]
        )
        self._open()

    @property
    def connector(self) -> PdScheduler:
        """Our part in the scheduler's process."""
        return self.scheduler.connector._scheduler  # type: ignore[union-attr]

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def _open(self) -> None:
        """What the workers' registration does, with a lender in virtual time."""
        ours, taking = self.connector, self.connector.get_kv_connector_stats

        def take_stats() -> PdStats | None:
            stats = taking()
            self.counts.update({} if stats is None else stats.data["counts"])
            return stats

        ours.get_kv_connector_stats = take_stats  # type: ignore[method-assign]
        geometry = RankGeometry(0, 0, self.rank.transport.address(), self.rank.memory.references)
        welcome = Welcome.in_our_version(self.name, ours._greeting.incarnation, TRAITS, (geometry,))
        parts = ours.parts
        if parts.waits is not None:
            parts.waits._clock = self.machine.clock
        if parts.pulling is not None:
            parts.pulling.workers_registered(UNSPLIT)
        if parts.lending is not None:
            self.lender = SimLender(self.world, self.machine, welcome)
            parts.lending._clock = self.machine.clock
            parts.lending._lender = self.lender

    def open(self, arrived: Callable[[], None]) -> Wire:
        """A reader dials."""
        return self.lender.open(arrived)

    def waiting_claims(self) -> int:
        """Claims of requests that have no blocks."""
        pulling = self.connector.parts.pulling
        assert pulling is not None
        tracked = pulling._tracked.values()
        return sum(one.ticket is not None and not one.pulling for one in tracked)

    def stands_still(self) -> bool:
        """Whether the last step computed nothing, nothing is loaded, and something is lent."""
        parts = self.connector.parts
        assert parts.lending is not None
        assert parts.pulling is not None
        return self._is_idle and not parts.pulling._pulling and len(parts.lending.pins) > 0

    # Requests

    def ask(
        self,
        number: int,
        num_tokens: int,
        max_tokens: int,
        params: dict[str, Any] | None,
        answered: Answered,
    ) -> str:
        """A request for the first ``num_tokens`` tokens of prompt ``number``."""
        name = f"{self.name}/{next(self._numbers)}"
        sampling = SamplingParams(
            max_tokens=max_tokens, min_tokens=max_tokens, ignore_eos=True,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )  # fmt: skip
        tokens = tokens_of(number)[:num_tokens]
        request = Request(name, tokens, sampling, None, block_hasher=self._hasher)
        self._asked[name] = Asked(number, request, answered)
        self.scheduler.add_request(request)
        self._wake()
        return name

    def _wake(self) -> None:
        if not self._is_stepping:
            self._is_stepping = True
            self.world.at(self.world.lag(), self._step)

    def _step(self) -> None:
        if not self.scheduler.has_requests():
            self._is_stepping = self._is_idle = False
            return
        self.num_steps += 1
        out = self.scheduler.schedule()
        metadata = out.kv_connector_metadata
        for command in metadata.commands:
            self.rank.pulls.apply_command(self._noted(command))
        self.rank.turn()
        num_tokens = out.total_num_scheduled_tokens
        self._is_idle = not num_tokens
        took_s = STEP_S + TOKEN_S * num_tokens if num_tokens else IDLE_S
        self.world.at(took_s, partial(self._computed, out))

    def _noted(self, command: Command) -> Command:
        """The command, with a claim under its request's name, as :mod:`tests.simulation.log` is."""
        if not isinstance(command, ClaimTicket):
            return command
        self.requests[command.request] = Pulled(command.ticket, command.pull)
        return replace(command, pull=command.request)

    def _computed(self, out: SchedulerOutput) -> None:
        """The pass is over: KV is written, tokens are sampled, requests end."""
        names = list(out.num_scheduled_tokens)
        sampled = [self._compute(name, out.num_scheduled_tokens[name]) for name in names]
        output = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)
        output.kv_connector_output = self._pulls()
        ended = self.scheduler.update_from_output(out, output)
        for outputs in ended.values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    asked = self._asked.pop(one.request_id)
                    if one.finish_reason.name == "ERROR":
                        self.world.counts["errors"] += 1
                    asked.answered(one.kv_transfer_params, list(asked.request.output_token_ids))
        self._step()

    def _compute(self, name: str, num_tokens: int) -> list[int]:
        asked = self._asked[name]
        request = asked.request
        after = request.num_computed_tokens
        before = after - num_tokens
        [blocks] = self.scheduler.kv_cache_manager.get_block_ids(name)
        memory = self.rank.memory
        for at in range(before):
            if not memory.holds_token(asked.number, at, blocks[at // BLOCK_TOKENS]):
                self.wrong.append(f"{name} at {at}")
        for at in range(before, after):
            memory.write_token(asked.number, at, blocks[at // BLOCK_TOKENS])
        return [] if after < request.num_tokens else [tokens_of(asked.number)[after]]

    def _pulls(self) -> KVConnectorOutput:
        results, self._pulled = self._pulled, []
        output, report = KVConnectorOutput(), PdWorkerReport()
        output.finished_recving = received = set()
        for pulled in results:
            received.update(pulled.received)
            for failed in pulled.failed:
                received.add(failed.request)
                output.failed_recving.add(failed.request)
                if failed.quarantined:
                    report.quarantined.append(failed.request)
                self.world.counts["pulls failed"] += 1
            for told in pulled.claims:
                report.claims.append(replace(told, pull=self.requests[told.request].pull))
            report.released += pulled.released
        self.world.counts["pulls received"] += len(received) - len(output.failed_recving)
        if not report.is_empty:
            output.kv_connector_worker_meta = report
        return output

    def reported(self, rank: DecodeRank, outcome: PullResults) -> None:
        """The rank's pulls have news."""
        self._pulled.append(outcome)


@cache
def tokens_of(number: int) -> list[int]:
    """Tokens of prompt ``number`` and its answers: each follows from its place."""
    return [number * LENGTH + at for at in range(LENGTH)]


def _hash(value: Any) -> bytes:
    return sha256(repr(value).encode()).digest()


class _Unstructured:
    """vLLM's manager of structured output, without any."""

    def accept_tokens(self, *_: Any, **__: Any) -> bool:
        return True

    def should_advance(self, *_: Any) -> bool:
        return False
