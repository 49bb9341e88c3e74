"""The reading side of one case: memory, transport, connected lenders, plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pdconn.sidechannel.clock import steady
from pdconn.tools.bench.bench_errors import LenderFailed, WrongBytes
from pdconn.tools.bench.transfer.arena import BenchMemory, copy
from pdconn.tools.bench.transfer.control import (
    AskCpu,
    CanLend,
    CannotLend,
    ControlConnection,
    FromLender,
    Open,
    Shut,
    Used,
)
from pdconn.tools.bench.transfer.methods import LayeredPairings, Method, ReadsByRank, raw_reads
from pdconn.tools.bench.transfer.mooncake import Mooncake
from pdconn.tools.bench.transfer.moves import Mover, Sample
from pdconn.tools.bench.transfer.paths import Path
from pdconn.tools.bench.transfer.workload import Workload, allocated, extent, placed
from registration.references import KVCacheReferences
from transport import Memory, Transport
from transport.closing import Closing

_SHUT_S = 20.0
"""Seconds for the lender to free its memory."""


class OpenCase(Closing):
    """One workload over one path, ready to be measured.

    Raises:
        LenderFailed: the lender refused, or disconnected.
        BenchError: there is too little memory.
    """

    def __init__(
        self,
        workload: Workload,
        path: Path,
        control: ControlConnection[FromLender],
        *,
        mooncake: bool = False,
    ) -> None:
        self.workload = workload
        self.path = path
        self._control = control
        self._stack = ExitStack()
        try:
            self._open(with_mooncake=mooncake)
        except BaseException:
            self._stack.close()
            raise

    def measure(self, method: Method) -> Sample:
        """Measure one method once.

        Raises:
            BenchError: a read failed, or timed out.
        """
        lender_before, before = self._lender_cpu(), time.process_time()
        sample = self._measures[method]()
        after, lender_after = time.process_time(), self._lender_cpu()
        return replace(
            sample, reader_cpu_s=after - before, lender_cpu_s=lender_after - lender_before
        )

    def check_bytes(self) -> None:
        """Pull once and compare the bytes with the lender's; the same with Mooncake.

        Raises:
            WrongBytes: some bytes differ.
        """
        for method in (Method.PDCONN, Method.MOONCAKE):
            if method in self._measures:
                self._arena.blank()
                self.measure(method)
                self._compare()

    def _compare(self) -> None:
        for request, reads in enumerate(self._planned):
            for rank, spans in reads:
                wrong = self._arena.wrong_bytes(spans, self._remote[rank], seed=rank)
                if wrong:
                    raise WrongBytes(f"request {request}, rank {rank}: {wrong:,} bytes are wrong")

    def facts(self) -> dict[str, dict[str, str]]:
        """The descriptions of both transports."""
        return {"reader": self._transport.describe(), "lender": self._lender_facts}

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods that this case can measure."""
        return tuple(self._measures)

    def close(self) -> None:
        """Release everything, including the lender's memory."""
        self._stack.close()

    # Opening

    def _open(self, *, with_mooncake: bool) -> None:
        workload = self.workload
        opened = self._ask(
            Open(
                workload.prefill,
                workload.lent[0].num_blocks,
                workload.sources(),
                self.path.name,
                with_mooncake,
            )
        )
        self._stack.callback(self._shut)
        self._arena = self._stack.enter_context(
            BenchMemory(extent(workload.ours()), huge_pages=self.path.huge_pages)
        )
        ours = allocated(workload.decode, workload.rank, workload.taken[0].num_blocks, self._arena)
        self._transport: Transport = self._stack.enter_context(
            self.path.open_transport("bench-reader")
        )
        self._transport.register([self._arena.memory])
        self._remote = {one.rank: Memory(one.base, one.nbytes) for one in opened.lent}
        theirs = workload.theirs()  # also of ranks that are not read, at fictional addresses
        for one in opened.lent:
            theirs[one.rank] = one.references
        peers = {one.rank: self._transport.connect(one.address) for one in opened.lent}
        self._moves = Mover(self._transport, peers)
        self._stack.callback(self._moves.close)
        self._lender_facts = opened.facts
        self._plan(ours, theirs, opened.mooncake)

    def _plan(
        self, ours: KVCacheReferences, theirs: Sequence[KVCacheReferences], mooncake: str
    ) -> None:
        """Plan every method; ``mooncake`` is the address of the lender's, if it has one."""
        workload = self.workload
        pairing = workload.pairing(ours, theirs)
        wanted = [
            (need, tables.lists)
            for need, tables in zip(workload.needs(), workload.lent, strict=True)
        ]
        self._planned = [pairing.plan(need, lent).reads for need, lent in wanted]
        layered = LayeredPairings.of_layers(
            *self._placed(workload.layered()), workload.rank % workload.decode.tp
        )
        by_layer = [layered.plan(need, lent) for need, lent in wanted]
        raw = self._raw_of(self._planned, self._remote)
        moves, pause_s = self._moves, self._moves.best_pause(raw)
        self._measures: dict[Method, Callable[[], Sample]] = {
            Method.PDCONN: lambda: moves.pull(Method.PDCONN, pairing, wanted),
            Method.LAYERED: lambda: moves.read_planned(Method.LAYERED, by_layer, pause_s),
            Method.RAW: lambda: moves.read_planned(Method.RAW, raw, pause_s),
            Method.MEMCPY: self._copy,
        }
        if mooncake:
            rival = self._open_mooncake()
            self._measures[Method.MOONCAKE] = lambda: self._read_mooncake(rival, mooncake)
        if workload.requests > 1:
            self._measures[Method.ALONE] = lambda: moves.pull(Method.ALONE, pairing, wanted[:1])

    def _placed(self, workload: Workload) -> tuple[KVCacheReferences, list[KVCacheReferences]]:
        """Both sides' references in the layout of ``workload``, at the real addresses."""
        ours = placed(workload.ours(), self._arena.memory)
        theirs = [
            placed(references, self._remote[rank]) if rank in self._remote else references
            for rank, references in enumerate(workload.theirs())
        ]
        return ours, theirs

    def _raw_of(
        self, planned: list[ReadsByRank], remote: Mapping[int, Memory]
    ) -> list[ReadsByRank]:
        made, at = [], self._arena.memory.base
        for reads in planned:
            total = sum(spans.total_bytes for _, spans in reads)
            made.append(raw_reads(reads, Memory(at, total), remote))
            at += total
        return made

    # Mooncake and memcpy

    def _open_mooncake(self) -> Mooncake:
        rival = Mooncake()
        self._stack.callback(rival.close)
        rival.register_memory(self._arena.memory)
        return rival

    def _read_mooncake(self, rival: Mooncake, address: str) -> Sample:
        nbytes, runs, began = 0, 0, steady()
        for reads in self._planned:
            for _, spans in reads:
                rival.read_spans(address, spans)
                nbytes += spans.total_bytes
                runs += len(spans)
        return Sample(Method.MOONCAKE, nbytes, runs, steady() - began)

    def _copy(self) -> Sample:
        total = sum(spans.total_bytes for reads in self._planned for _, spans in reads)
        memory = self._arena.memory
        nbytes = min(total, memory.nbytes // 2)
        began = steady()
        copy(memory, Memory(memory.base + nbytes, nbytes), nbytes)
        return Sample(Method.MEMCPY, nbytes, 1, steady() - began)

    # The lender

    def _ask(self, message: Open) -> CanLend:
        self._control.send_message(message)
        match self._control.receive_message():
            case CanLend() as opened:
                return opened
            case CannotLend(why):
                raise LenderFailed(f"the lender refuses: {why}")
            case other:
                raise LenderFailed(f"the lender: expected what it lends, got {other}")

    def _lender_cpu(self) -> float:
        self._control.send_message(AskCpu())
        answer = self._control.receive_message()
        if not isinstance(answer, Used):
            raise LenderFailed(f"the lender: expected CPU seconds, got {answer}")
        return answer.cpu_s

    def _shut(self) -> None:
        self._control.send_message(Shut())
        self._control.receive_message(_SHUT_S)
