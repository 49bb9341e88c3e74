"""Points in a GPU's stream, to wait for before memory is written to."""

from __future__ import annotations

from typing import Protocol

from transport.types import Device


class StreamPoint(Protocol):
    """A point in a GPU's stream, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether all work before it is done.  Never waits."""
        ...

    def synchronize(self) -> object:
        """Wait until all work before it is done."""
        ...


def stream_point(device: Device) -> StreamPoint | None:
    """The end of the work queued in the calling thread's stream; None on a CPU."""
    if device.kind != "cuda":
        return None
    import torch

    event = torch.cuda.current_stream(device.index).record_event()
    point: StreamPoint = event
    return point
