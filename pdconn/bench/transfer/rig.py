"""A reader's side of one case, open: memory, transport, lenders connected, plans ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from pdconn.bench.errors import LenderFailed, WrongBytes
from pdconn.bench.transfer.arena import BenchMemory, copy
from pdconn.bench.transfer.control import (
    AskCpu,
    CannotLend,
    FromLender,
    Open,
    Opened,
    Shut,
    Talk,
    Used,
)
from pdconn.bench.transfer.lines import LayerByLayer, Line, ReadsByRank, raw_reads
from pdconn.bench.transfer.mooncake import Mooncake
from pdconn.bench.transfer.moves import Moves, Sample
from pdconn.bench.transfer.paths import Path
from pdconn.bench.transfer.workload import Workload, extent, placed
from pdconn.sidechannel.clock import steady
from registration.references import KVCacheReferences
from transport import Memory, Transport
from transport.closing import Closing


class OpenCase(Closing):
    """One workload over one path, ready to be measured.

    Raises:
        LenderFailed: the lender refused, or has left.
        BenchError: there is not so much memory.
    """

    def __init__(
        self, workload: Workload, path: Path, talk: Talk[FromLender], *, mooncake: bool = False
    ) -> None:
        self.workload = workload
        self._with_mooncake = mooncake
        self.path = path
        self._talk = talk
        self._stack = ExitStack()
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise

    def measure(self, line: Line) -> Sample:
        """Take one turn.

        Raises:
            BenchError: a read failed or does not end.
        """
        lender_before, before = self._lender_cpu(), time.process_time()
        sample = self._turns[line]()
        after, lender_after = time.process_time(), self._lender_cpu()
        return replace(
            sample, reader_cpu_s=after - before, lender_cpu_s=lender_after - lender_before
        )

    def check(self) -> None:
        """Pull once and compare what came with what the lender holds; Mooncake likewise.

        Raises:
            WrongBytes: some of it is something else.
        """
        for line in (Line.PDCONN, Line.MOONCAKE):
            if line in self._turns:
                self._arena.blank()
                self.measure(line)
                self._compare()

    def _compare(self) -> None:
        for request, reads in enumerate(self._planned):
            for rank, spans in reads:
                wrong = self._arena.wrong_bytes(spans, self._remote[rank], seed=rank)
                if wrong:
                    raise WrongBytes(f"request {request}, rank {rank}: {wrong:,} bytes are wrong")

    def facts(self) -> dict[str, dict[str, str]]:
        """What both transports say of themselves."""
        return {"reader": self._transport.describe(), "lender": self._lender_facts}

    @property
    def lines(self) -> tuple[Line, ...]:
        """Those that make sense here."""
        return tuple(self._turns)

    def close(self) -> None:
        """Give everything back, the lender's memory too."""
        self._stack.close()

    # Opening

    def _open(self) -> None:
        workload = self.workload
        opened = self._ask(
            Open(
                workload.prefill,
                workload.lent[0].num_blocks,
                workload.sources(),
                self.path.name,
                self._with_mooncake,
            )
        )
        self._stack.callback(self._shut)
        ours = workload.ours()
        self._arena = self._stack.enter_context(
            BenchMemory(extent(ours), huge_pages=self.path.huge_pages)
        )
        self._transport: Transport = self._stack.enter_context(self.path.open("bench-reader"))
        self._transport.register([self._arena.memory])
        self._remote = {one.rank: Memory(one.base, one.nbytes) for one in opened.lent}
        peers = {one.rank: self._transport.connect(one.address) for one in opened.lent}
        self._moves = Moves(self._transport, peers)
        self._stack.callback(self._moves.close)
        self._lender_facts = opened.facts
        self._mooncake = self._open_mooncake() if opened.mooncake else None
        self._mooncake_address = opened.mooncake
        self._plan()

    def _plan(self) -> None:
        workload = self.workload
        ours, theirs = self._placed(workload)
        pairing = workload.pairing(ours, theirs)
        wanted = [
            (need, tables.lists)
            for need, tables in zip(workload.needs(), workload.lent, strict=True)
        ]
        self._planned = [pairing.plan(need, lent).reads for need, lent in wanted]
        layered = LayerByLayer.of(
            *self._placed(workload.layered()), workload.rank % workload.decode.tp
        )
        by_layer = [layered.plan(need, lent) for need, lent in wanted]
        raw = self._raw_of(self._planned, self._remote)
        moves, pause_s = self._moves, self._moves.best_pause(raw)
        self._turns: dict[Line, Callable[[], Sample]] = {
            Line.PDCONN: lambda: moves.pull(Line.PDCONN, pairing, wanted),
            Line.LAYERED: lambda: moves.read(Line.LAYERED, by_layer, pause_s),
            Line.RAW: lambda: moves.read(Line.RAW, raw, pause_s),
            Line.MEMCPY: self._copy,
        }
        if self._mooncake is not None:
            self._turns[Line.MOONCAKE] = self._read_mooncake
        if workload.requests > 1:
            self._turns[Line.ALONE] = lambda: moves.pull(Line.ALONE, pairing, wanted[:1])

    def _placed(self, workload: Workload) -> tuple[KVCacheReferences, list[KVCacheReferences]]:
        """Both sides' memory as ``workload`` lays it out, where ours and the lender's is."""
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

    # The rivals

    def _open_mooncake(self) -> Mooncake:
        rival = Mooncake()
        self._stack.callback(rival.close)
        rival.register(self._arena.memory)
        return rival

    def _read_mooncake(self) -> Sample:
        assert self._mooncake is not None
        nbytes, runs, began = 0, 0, steady()
        for reads in self._planned:
            for _, spans in reads:
                self._mooncake.read(self._mooncake_address, spans)
                nbytes += spans.total_bytes
                runs += len(spans)
        return Sample(Line.MOONCAKE, nbytes, runs, steady() - began)

    def _copy(self) -> Sample:
        total = sum(spans.total_bytes for reads in self._planned for _, spans in reads)
        memory = self._arena.memory
        nbytes = min(total, memory.nbytes // 2)
        began = steady()
        copy(memory, Memory(memory.base + nbytes, nbytes), nbytes)
        return Sample(Line.MEMCPY, nbytes, 1, steady() - began)

    # The lender

    def _ask(self, message: Open) -> Opened:
        self._talk.send(message)
        match self._talk.receive():
            case Opened() as opened:
                return opened
            case CannotLend(why):
                raise LenderFailed(f"the lender refuses: {why}")
            case other:
                raise LenderFailed(f"the lender: expected what it lends, got {other}")

    def _lender_cpu(self) -> float:
        self._talk.send(AskCpu())
        answer = self._talk.receive()
        if not isinstance(answer, Used):
            raise LenderFailed(f"the lender: expected CPU seconds, got {answer}")
        return answer.cpu_s

    def _shut(self) -> None:
        self._talk.send(Shut())
        self._talk.receive()
