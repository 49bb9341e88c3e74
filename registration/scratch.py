"""A page of memory for reads whose bytes are not used, such as those that warm a lender up.

It lies on the device of the KV memory, so that a read into it takes the same path as a
pull.  Register it after the transport's address was taken: an address covers what was
registered before, so that no peer can read the page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transport import Device, Memory

PAGE_NBYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """One page; ``tensor`` owns it and must outlive its registration."""

    tensor: torch.Tensor
    memory: Memory

    @classmethod
    def on(cls, device: Device) -> Scratch:
        """A new page on ``device``, aligned to a page, as memory is pinned by whole pages.

        Raises:
            MemoryError: a GPU that has none to spare.
        """
        where = torch.device("cpu" if device.kind == "cpu" else f"cuda:{device.index}")
        try:
            tensor = torch.zeros(2 * PAGE_NBYTES, dtype=torch.uint8, device=where)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        base = -(-tensor.data_ptr() // PAGE_NBYTES) * PAGE_NBYTES
        return cls(tensor, Memory(base, PAGE_NBYTES, device))
