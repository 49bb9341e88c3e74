"""A budget without an end, for tests of everything else."""

from __future__ import annotations

from typing import Any


class EndlessBudget:
    """Grants everything, evicts nothing."""

    def take(self, nbytes: int) -> bool:
        return True

    def open(self, shelf: Any) -> None: ...

    def step(self, shelf: Any, namespace: str) -> list[Any]:
        return []

    def commit(self, shelf: Any, part: Any, namespace: str, name: Any) -> bool:
        return bool(shelf.commit(part.writer, part.part, namespace, name))

    def release(self, nbytes: int) -> None: ...

    def remove(self, shelf: Any, namespace: str, name: Any) -> int:
        return int(shelf.remove(namespace, name))

    def usage(self) -> dict[str, int]:
        return {}

    def take_listing(self) -> None:
        return None

    def take_evicted(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None: ...
