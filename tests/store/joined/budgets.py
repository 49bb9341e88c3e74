"""Budgets: one without an end, for tests of everything else, and one that grants so much a time."""

from __future__ import annotations

from typing import Any

from pdconn.lifecycle.promises import PromiseLimits
from pdconn.threads import AmountBox


class _Endless(AmountBox):
    """Gives whatever is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = 1 << 60

    def take_amount(self, amount: int) -> bool:
        return True


class EndlessBudget:
    """Grants everything, evicts nothing."""

    def __init__(self) -> None:
        self.room: AmountBox = _Endless()

    def open_accounts(self, shelf: Any) -> None: ...

    def make_room(self, shelf: Any, namespace: str) -> list[Any]:
        return []

    def commit_row(self, shelf: Any, part: Any, namespace: str, name: Any) -> bool:
        return bool(shelf.commit(part.writer, part.part, namespace, name))

    def release_bytes(self, nbytes: int) -> None: ...

    def remove_damaged(self, shelf: Any, namespace: str, name: Any) -> int:
        return int(shelf.remove_row(namespace, name))

    def keep_limits(self) -> PromiseLimits:
        return PromiseLimits(1 << 60, 1 << 60, 3600.0)

    def usage_gauges(self) -> dict[str, int]:
        return {}

    def take_listing(self) -> None:
        return None

    def take_evicted(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None: ...


class GrantedBudget(EndlessBudget):
    """Has room for what a test grants, and evicts nothing."""

    def __init__(self) -> None:
        self.room = AmountBox()

    def release_bytes(self, nbytes: int) -> None:
        self.room.add_amount(nbytes)
