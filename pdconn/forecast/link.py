"""The bandwidth of a link, and the cost of each descriptor of a read.

A rank that reads needs bytes / bandwidth + descriptors x seconds each, a rank that is read
bytes / bandwidth of its own link.  The presets are medians
of NIXL 1.5.1 reads between two processes of one machine, host memory, two cores.  For other
speeds the nominal bandwidth is used, and the cost per descriptor is an assumption.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from pdconn.forecast.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Link:
    """The link of one rank.

    ``source`` says where the numbers come from.  ``reader_copies``: the reader's core copies
    the bytes, so that a rank that is read sets no limit.

    Raises:
        ShapeError: the speed is below 1 byte per second, or the cost is negative.
    """

    name: str
    bytes_per_s: float
    descriptor_s: float
    source: str
    reader_copies: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s >= 1):
            raise ShapeError("link", "a speed of at least a byte per second", self.name)
        if not (math.isfinite(self.descriptor_s) and 0 <= self.descriptor_s < 1):
            raise ShapeError(
                "descriptor-us", "0 to below 1000000 microseconds", f"{self.descriptor_s * 1e6:g}"
            )

    def seconds(self, nbytes: int, descriptors: int) -> float:
        """Time to read ``nbytes`` bytes in ``descriptors`` pieces."""
        return nbytes / self.bytes_per_s + descriptors * self.descriptor_s

    def seconds_to_send(self, nbytes: int) -> float:
        """Time in which a rank at this link can be read ``nbytes`` bytes; 0 without a limit."""
        return 0.0 if self.reader_copies else nbytes / self.bytes_per_s


_ASSUMED_DESCRIPTOR_S = 0.2e-6

PRESETS: tuple[Link, ...] = (
    Link("shm", 7.5e9, 2.2e-6, "measured: CMA between two processes, 4 KiB pages", True),
    Link("shm-huge", 18e9, 2.2e-6, "measured: CMA between two processes, huge pages", True),
    Link("tcp", 6.5e9, 7e-6, "measured: UCX tcp on loopback, 256 KiB segments"),
)

_SPEED = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT])([bB])/s")
_SCALE = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_link(text: str, descriptor_us: float | None = None) -> Link:
    """A preset's name, or a speed like ``400Gb/s`` (bits) or ``50GB/s`` (bytes).

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
    return replace(found, descriptor_s=descriptor_us * 1e-6, source=source)


def _speed(text: str) -> Link:
    match = _SPEED.fullmatch(text.strip())
    if match is None:
        names = ", ".join(preset.name for preset in PRESETS)
        raise ShapeError("link", f"{names}, or a speed like 400Gb/s or 50GB/s", text)
    number, scale, unit = match.groups()
    bytes_per_s = float(number) * _SCALE[scale] / (8 if unit == "b" else 1)
    source = f"as given; {_ASSUMED_DESCRIPTOR_S * 1e6:g} us a descriptor is an assumption"
    return Link(text.strip(), bytes_per_s, _ASSUMED_DESCRIPTOR_S, source)
