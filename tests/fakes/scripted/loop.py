"""An event loop whose time stands still until a test moves it: for what waits for no socket."""

from __future__ import annotations

import asyncio
from typing import Any

MOST_TURNS = 10_000


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers ring when :meth:`advance` has come to them.

    >>> loop = VirtualLoop()
    >>> nap = loop.create_task(asyncio.sleep(3600.0))
    >>> loop.advance(3599.0), nap.done()
    (None, False)
    >>> loop.advance(1.0), nap.done()
    (None, True)
    >>> loop.close()
    """

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0

    def time(self) -> float:
        """Seconds, as they were advanced."""
        return self._virtual_s

    def settle(self) -> None:
        """Run all that is ready, and what that makes ready."""
        ready: Any = vars(self)["_ready"]
        for _ in range(MOST_TURNS):
            self.call_soon(self.stop)
            self.run_forever()
            if not ready:
                return
        raise AssertionError("it never rests")

    def advance(self, seconds: float) -> None:
        """So much later everything that was due has run, in its order."""
        until = self._virtual_s + seconds
        scheduled: Any = vars(self)["_scheduled"]
        self.settle()
        while scheduled and (due := min(one.when() for one in scheduled)) <= until:
            self._virtual_s = max(self._virtual_s, due)
            self.settle()
        self._virtual_s = until
        self.settle()
