"""A reader's side of one case, open: memory, transport, lenders connected, plans ready."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pdconn.bench.arena import Arena, copy
from pdconn.bench.control import Ask, FromLender, Open, Opened, Refused, Shut, Talk, Used
from pdconn.bench.errors import BenchError, LenderFailed, WrongBytes
from pdconn.bench.lines import LayerByLayer, Line, ReadsByRank, raw_reads
from pdconn.bench.mooncake import Mooncake
from pdconn.bench.paths import Path
from pdconn.bench.workload import Workload, extent, placed
from pdconn.planning.plan import Need, Pairing
from pdconn.runtime.clock import steady
from pdconn.runtime.reader import News, Read, ReaderStopped, ReaderThread, ReadSettled
from registration.references import KVCacheReferences
from transport import Memory, PeerId, Settled, Transport

PATIENCE_S = 120.0
"""How long one pull may take before it counts as stuck."""

_PAUSES_S = (0.0, 0.00005)


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn of one line.

    ``runs`` are descriptors after merging.  ``plan_s`` and ``post_s`` are summed over the
    requests; ``wall_s`` is from the first plan to the last byte, ``each_s`` likewise for
    every request, all counted from the same beginning.  CPU is user and system time.
    """

    line: Line
    nbytes: int
    runs: int
    wall_s: float
    each_s: tuple[float, ...] = ()
    plan_s: float = 0.0
    post_s: float = 0.0
    reader_cpu_s: float = 0.0
    lender_cpu_s: float = 0.0


@dataclass(slots=True)
class _Tally:
    """What is known of a turn while its reads settle."""

    reads: list[int]
    nbytes: int = 0
    runs: int = 0
    post_s: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)

    def add(self, request: int, settled: Settled, at: float) -> None:
        if settled.error is not None:
            raise BenchError(f"a read failed: {settled.error}") from settled.error
        self.nbytes += settled.stats.nbytes
        self.runs += settled.stats.num_descriptors
        self.post_s += settled.stats.post_s
        self.reads[request] -= 1
        if self.reads[request] == 0:
            self.ends[request] = at


class Rig:
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
        return Sample(
            sample.line,
            sample.nbytes,
            sample.runs,
            sample.wall_s,
            sample.each_s,
            sample.plan_s,
            sample.post_s,
            after - before,
            lender_after - lender_before,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

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
            Arena(extent(ours), huge_pages=self.path.huge_pages)
        )
        self._transport: Transport = self.path.open("bench-reader")
        reader: ReaderThread | None = None
        try:
            self._transport.register([self._arena.memory])
            self._remote = {one.rank: Memory(one.base, one.nbytes) for one in opened.lent}
            self._peers: dict[int, PeerId] = {
                one.rank: self._transport.connect(one.address) for one in opened.lent
            }
            self._news: queue.SimpleQueue[News | ReaderStopped] = queue.SimpleQueue()
            reader = ReaderThread(self._transport, self._news.put)
        finally:
            self._stack.callback(self._transport.close if reader is None else reader.close)
        self._reader = reader
        self._lender_facts = opened.facts
        self._mooncake = self._open_mooncake() if opened.mooncake else None
        self._mooncake_address = opened.mooncake
        self._plan()

    def _plan(self) -> None:
        workload = self.workload
        ours, theirs = self._placed(workload)
        self._pairing: Pairing = workload.pairing(ours, theirs)
        self._needs: list[Need] = workload.needs()
        self._planned = [
            self._pairing.plan(need, tables.lists).reads
            for need, tables in zip(self._needs, workload.lent, strict=True)
        ]
        layered = LayerByLayer.of(
            *self._placed(workload.layered()), workload.rank % workload.decode.tp
        )
        self._layered = [
            layered.plan(need, tables.lists)
            for need, tables in zip(self._needs, workload.lent, strict=True)
        ]
        self._raw = self._raw_of(self._planned, self._remote)
        pause_s = self._best_pause()
        self._turns: dict[Line, Callable[[], Sample]] = {
            Line.PDCONN: lambda: self._pull(Line.PDCONN, len(self._needs)),
            Line.LAYERED: lambda: self._read_bare(Line.LAYERED, self._layered, pause_s),
            Line.RAW: lambda: self._read_bare(Line.RAW, self._raw, pause_s),
            Line.MEMCPY: self._copy,
        }
        if self._mooncake is not None:
            self._turns[Line.MOONCAKE] = self._read_mooncake
        if workload.requests > 1:
            self._turns[Line.ALONE] = lambda: self._pull(Line.ALONE, 1)

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

    # Measuring

    def _pull(self, line: Line, requests: int) -> Sample:
        """Plan on this thread and read on the reader's, as a decode engine does."""
        tally = _Tally([len(reads) for reads in self._planned[:requests]])
        plan_s, began = 0.0, steady()
        for request in range(requests):
            planning = steady()
            plan = self._pairing.plan(self._needs[request], self.workload.lent[request].lists)
            plan_s += steady() - planning
            for rank, spans in plan.reads:
                self._reader.post(Read(request, self._peers[rank], spans))
        while len(tally.ends) < requests:
            try:
                news = self._news.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise BenchError(f"a pull did not end within {PATIENCE_S} s") from None
            if not isinstance(news, ReadSettled) or not isinstance(news.tag, int):
                raise BenchError(f"the reader says {news}")
            tally.add(news.tag, news.settled, news.at)
        return self._sampled(line, tally, began, plan_s)

    def _best_pause(self) -> float:
        """Between polls of a bare read: none, or one that leaves a core to who moves bytes."""
        return min(
            _PAUSES_S,
            key=lambda pause_s: min(
                self._read_bare(Line.RAW, self._raw, pause_s).wall_s for _ in range(3)
            ),
        )

    def _read_bare(self, line: Line, planned: list[ReadsByRank], pause_s: float) -> Sample:
        """Post everything and poll; the reader's thread sleeps meanwhile."""
        tally = _Tally([len(reads) for reads in planned])
        began = steady()
        open_reads = {
            self._transport.read(self._peers[rank], spans): request
            for request, reads in enumerate(planned)
            for rank, spans in reads
        }
        while open_reads:
            for read in list(open_reads):
                settled = self._transport.poll(read)
                if settled is not None:
                    tally.add(open_reads.pop(read), settled, steady())
            if open_reads and pause_s:
                time.sleep(pause_s)
            if steady() - began > PATIENCE_S:
                raise BenchError(f"a read did not end within {PATIENCE_S} s")
        return self._sampled(line, tally, began, 0.0)

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

    def _sampled(self, line: Line, tally: _Tally, began: float, plan_s: float) -> Sample:
        each = tuple(tally.ends[request] - began for request in sorted(tally.ends))
        return Sample(line, tally.nbytes, tally.runs, max(each), each, plan_s, tally.post_s)

    # The lender

    def _ask(self, message: Open) -> Opened:
        self._talk.send(message)
        match self._talk.receive():
            case Opened() as opened:
                return opened
            case Refused(why):
                raise LenderFailed(f"the lender refuses: {why}")
            case other:
                raise LenderFailed(f"the lender: expected what it lends, got {other}")

    def _lender_cpu(self) -> float:
        self._talk.send(Ask())
        answer = self._talk.receive()
        if not isinstance(answer, Used):
            raise LenderFailed(f"the lender: expected CPU seconds, got {answer}")
        return answer.cpu_s

    def _shut(self) -> None:
        self._talk.send(Shut())
        self._talk.receive()
