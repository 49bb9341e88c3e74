"""The bandwidth of a link, the cost of each descriptor of a read, and the round trips of a pull.

A reading rank needs bytes / bandwidth + descriptors x seconds each, a rank that is read bytes /
bandwidth of its own link.  A pull also waits for three round trips: it claims the lease, reads, and
confirms that the lease lasted.

``MEASURED`` are medians of NIXL 1.5.1 reads between two processes of one machine, host memory, two
cores; their descriptors' cost includes round trips.  ``ASSUMED`` are nominal values of networks,
and each names the numbers that it assumes.  Other speeds use the nominal bandwidth, with an assumed
cost per descriptor.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from pdconn.tools.plan.plan_errors import ShapeError

ROUND_TRIPS = 3


@dataclass(frozen=True, slots=True)
class Link:
    """The link of one rank.

    ``source`` is the origin of the numbers.  ``reader_copies``: the reader's core copies the bytes,
    so that a rank that is read sets no limit.  ``round_trip_s``: for a small message and its
    answer; 0 if unknown.  ``assumed`` names the fields that were not measured.

    Raises:
        ShapeError: the speed is below 1 byte per second, or a cost is negative.
    """

    name: str
    bytes_per_s: float
    descriptor_s: float
    source: str
    reader_copies: bool = False
    round_trip_s: float = 0.0
    assumed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s >= 1):
            raise ShapeError("link", "a speed of at least a byte per second", self.name)
        if not (math.isfinite(self.descriptor_s) and 0 <= self.descriptor_s < 1):
            raise ShapeError(
                "descriptor-us", "0 to below 1000000 microseconds", f"{self.descriptor_s * 1e6:g}"
            )
        if not (math.isfinite(self.round_trip_s) and 0 <= self.round_trip_s < 1):
            raise ShapeError("round trip", "0 to below 1 second", self.round_trip_s)

    @property
    def latency_s(self) -> float:
        """The waiting time of a pull, however short it is."""
        return ROUND_TRIPS * self.round_trip_s

    def seconds_to_read(self, nbytes: int, descriptors: int) -> float:
        """Time to read ``nbytes`` bytes in ``descriptors`` pieces."""
        return nbytes / self.bytes_per_s + descriptors * self.descriptor_s

    def seconds_to_send(self, nbytes: int) -> float:
        """Minimum time for a rank at this link to be read ``nbytes`` bytes; 0 without a limit."""
        return 0.0 if self.reader_copies else nbytes / self.bytes_per_s


_ALL = frozenset({"bytes_per_s", "descriptor_s", "round_trip_s"})
_ASSUMED_DESCRIPTOR_S = 0.2e-6
_MEASURED_CUDA_DESCRIPTOR_S = 10.7e-6
"""UCX 1.23 launches one copy per run: between two processes of one H100, by ``cuda_ipc``."""
_MEASURED_TCP_DESCRIPTOR_S = 7e-6
_MEASURED_TCP_BYTES_PER_S = 6.5e9
_OF_LINE_RATE = 0.92

MEASURED: tuple[Link, ...] = (
    Link("shm", 7.5e9, 2.2e-6, "measured: CMA between two processes, 4 KiB pages", True),
    Link("shm-huge", 18e9, 2.2e-6, "measured: CMA between two processes, huge pages", True),
    Link(
        "tcp",
        _MEASURED_TCP_BYTES_PER_S,
        _MEASURED_TCP_DESCRIPTOR_S,
        "measured: UCX tcp on loopback, 256 KiB segments",
    ),
)


def _rdma(gbit: int) -> Link:
    """InfiniBand or RoCE, one card per rank."""
    return Link(
        f"rdma-{gbit}",
        _OF_LINE_RATE * gbit * 1e9 / 8,
        _ASSUMED_DESCRIPTOR_S,
        f"assumed: {_OF_LINE_RATE:.0%} of {gbit} Gbit/s",
        round_trip_s=5e-6,
        assumed=_ALL,
    )


def _tcp(gbit: int) -> Link:
    """Ethernet without RDMA: at most the loopback throughput of one core."""
    line = _OF_LINE_RATE * gbit * 1e9 / 8
    is_core = line > _MEASURED_TCP_BYTES_PER_S
    limit = "what one core moves" if is_core else f"{_OF_LINE_RATE:.0%} of {gbit} Gbit/s"
    return Link(
        f"tcp-{gbit}",
        min(line, _MEASURED_TCP_BYTES_PER_S),
        _MEASURED_TCP_DESCRIPTOR_S,
        f"assumed: {limit}; a descriptor as measured on loopback",
        round_trip_s=50e-6,
        assumed=_ALL,
    )


ASSUMED: tuple[Link, ...] = (
    Link(
        "nvlink",
        0.8 * 450e9,
        _MEASURED_CUDA_DESCRIPTOR_S,
        "assumed: 80% of an H100's 450 GB/s one way; a run as measured within one H100",
        round_trip_s=20e-6,
        assumed=_ALL - {"descriptor_s"},
    ),
    *(_rdma(gbit) for gbit in (400, 200, 100)),
    *(_tcp(gbit) for gbit in (100, 25, 10)),
)

PRESETS = (*MEASURED, *ASSUMED)

_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT])([bB])/s")
_SCALE = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_link(text: str, descriptor_us: float | None = None) -> Link:
    """Parse a preset's name, or a speed like ``400Gb/s`` (bits) or ``50GB/s`` (bytes).

    Args:
        descriptor_us: microseconds per descriptor; by default the preset's, or an assumption.

    Raises:
        ShapeError: neither a preset nor a speed.

    >>> parse_link("400Gb/s").bytes_per_s
    50000000000.0
    """
    found = next((preset for preset in PRESETS if preset.name == text), None) or _speed(text)
    if descriptor_us is None:
        return found
    source = f"{found.source.partition(';')[0]}; {descriptor_us:g} us a descriptor as given"
    assumed = found.assumed - {"descriptor_s"}
    return replace(found, descriptor_s=descriptor_us * 1e-6, source=source, assumed=assumed)


def _speed(text: str) -> Link:
    match = _SPEED.fullmatch(text.strip())
    if match is None:
        names = ", ".join(preset.name for preset in PRESETS)
        raise ShapeError("link", f"{names}, or a speed like 400Gb/s or 50GB/s", text)
    number, scale, unit = match.groups()
    bytes_per_s = float(number) * _SCALE[scale] / (8 if unit == "b" else 1)
    source = f"as given; {_ASSUMED_DESCRIPTOR_S * 1e6:g} us a descriptor is an assumption"
    assumed = frozenset({"descriptor_s"})
    return Link(text.strip(), bytes_per_s, _ASSUMED_DESCRIPTOR_S, source, assumed=assumed)
