"""The byte budget of a root as the keeper uses it."""

from __future__ import annotations

from typing import Any


class RootBudget:
    def __init__(self, *args: Any) -> None: ...

    def take(self, nbytes: int) -> bool:
        return True

    def open(self, shelf: Any) -> None: ...

    def step(self, shelf: Any, namespace: str) -> list[Any]:
        return []

    def committing(self, nbytes: int, kind: Any) -> None: ...

    def not_committed(self, nbytes: int, kind: Any) -> None: ...

    def committed(self, row: Any) -> None: ...

    def release(self, nbytes: int) -> None: ...

    def removed(self, nbytes: int, kind: Any) -> None: ...

    def usage(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...
