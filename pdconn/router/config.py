"""The proxy's settings, checked once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pdconn.router.engines import engine_name
from pdconn.router.errors import BadSetting


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """How a proxy runs.

    ``prefill`` and ``decode`` are base URLs as ``engine_name`` writes them; an
    engine may be in both.  Port 0 takes any free port.

    Raises:
        BadSetting: a value makes no sense; names its command-line option.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    max_body_mib: float = 64.0
    connect_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0
    wait_s: float | None = None

    def __post_init__(self) -> None:
        for field, engines in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not engines:
                raise BadSetting(field, "at least one URL", "none")
            twice = next((name for name in engines if engines.count(name) > 1), None)
            if twice is not None:
                raise BadSetting(field, "each URL once", twice)
        if not 0 <= self.port <= 65535:
            raise BadSetting("--port", "a number from 0 to 65535", self.port)
        if not (math.isfinite(self.max_body_mib) and self.max_body_nbytes >= 1):
            raise BadSetting("--max-body-mib", "MiB, more than 0", self.max_body_mib)
        for field, value, least in (
            ("--connect-timeout", self.connect_timeout_s, 0.001),
            ("--drain-timeout", self.drain_timeout_s, 0.0),
            ("--wait", self.wait_s or 0.0, 0.0),
        ):
            if not (math.isfinite(value) and value >= least):
                raise BadSetting(field, f"seconds, at least {least:g}", value)

    @property
    def max_body_nbytes(self) -> int:
        """The longest body that is read."""
        return int(self.max_body_mib * (1 << 20))

    @classmethod
    def of(cls, prefill: Sequence[str], decode: Sequence[str], **settings: object) -> Self:
        """From URLs as people write them."""
        return cls(
            prefill=tuple(engine_name("--prefill", url) for url in prefill),
            decode=tuple(engine_name("--decode", url) for url in decode),
            **settings,  # type: ignore[arg-type]
        )
