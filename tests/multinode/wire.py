"""Cables whose packets come late or never, in user space: a process, and our side of it.

The kernel's own means, ``tc netem``, is not built into every kernel, so each cable is a pair
of TAP devices, and the process between them holds every frame back and drops some:

    eth0 of a machine ═ TAP ═ this process ═ TAP ═ port of the switch

One JSON object a line: ``{"delay_s": …, "loss": …}`` comes in, what has passed and been lost
so far goes out.  The process ends, and its devices with it, when its input closes.  Started
by path, so it imports nothing but the standard library.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LONGEST_FRAME = 65_536
_AT_ONCE = 64  # frames from one end before the others' turn


@dataclass(frozen=True)
class Passed:
    """Frames, of all cables and both directions, since the wire was made."""

    passed: int
    lost: int


class Wire:
    """Our side: the process, while this is open.

    Args:
        within: words that run a command where the switch is.
        names: of its ports there; what becomes ``eth0`` elsewhere is ``far_end(name)``.
    """

    def __init__(self, within: Sequence[str], names: Sequence[str]) -> None:
        ends = [f"{name}:{self.far_end(name)}" for name in names]
        self._process = subprocess.Popen(
            [*within, sys.executable, "-S", __file__, *ends],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._hear()

    @staticmethod
    def far_end(name: str) -> str:
        """The device at the other end of the cable at port ``name``."""
        return f"{name}-far"

    def be(self, *, delay_s: float = 0.0, loss: float = 0.0) -> Passed:
        """From now on hold each frame back for ``delay_s``, and lose a share ``loss``.

        Raises:
            EOFError: the process has died.
        """
        assert self._process.stdin is not None
        print(json.dumps({"delay_s": delay_s, "loss": loss}), file=self._process.stdin, flush=True)
        return self._hear()

    def _hear(self) -> Passed:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the wire ended with {self._process.wait()}")
        return Passed(**json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.__exit__(kind, error, trace)


class _Relay:
    """What the process does: frames from one end of a cable to the other."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._other = dict(pairs) | {far: near for near, far in pairs}
        self._late: list[tuple[float, int, int, bytes]] = []
        self._chance = random.Random(20)
        self._delay_s = self._loss = 0.0
        self._passed = self._lost = self._number = 0

    def run(self) -> None:
        """Until the input closes."""
        poll = select.epoll()
        for end in (0, *self._other):
            poll.register(end, select.EPOLLIN)
        self._tell()
        while True:
            for end, _ in poll.poll(self._wait_s()):
                if end != 0:
                    self._take(end)
                elif not self._listen():
                    return
            self._send_due()

    def _wait_s(self) -> float:
        return max(0.0, self._late[0][0] - time.monotonic()) if self._late else -1.0

    def _listen(self) -> bool:
        line = sys.stdin.readline()
        if line:
            weather = json.loads(line)
            self._delay_s, self._loss = weather["delay_s"], weather["loss"]
            self._tell()
        return bool(line)

    def _tell(self) -> None:
        print(json.dumps(asdict(Passed(self._passed, self._lost))), flush=True)

    def _take(self, end: int) -> None:
        due = time.monotonic() + self._delay_s
        for _ in range(_AT_ONCE):
            try:
                frame = os.read(end, _LONGEST_FRAME)
            except OSError:  # no more for now, or the device is down
                return
            if self._chance.random() < self._loss:
                self._lost += 1
            else:
                self._number += 1
                heapq.heappush(self._late, (due, self._number, self._other[end], frame))

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            *_, end, frame = heapq.heappop(self._late)
            try:
                os.write(end, frame)
                self._passed += 1
            except OSError:  # the cable is out there
                self._lost += 1


def _tap(name: str) -> int:
    """A new TAP device, which lives as long as the descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


if __name__ == "__main__":
    _Relay([tuple(map(_tap, word.split(":"))) for word in sys.argv[1:]]).run()  # type: ignore[misc]
