"""Zeros where a pull or a load leaves a gap in a block, in host or GPU memory.

A call returns when all of them are there.  Nothing else may write the gaps meanwhile, and nobody
reads them: the blocks belong to a request that waits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdconn.integrity.memory import OnDevice
from pdconn.planning.runs import Gaps
from transport import Memory

I64 = NDArray[np.int64]

_LARGEST_GRAIN = 1 << 20


def fill_with_zeros(gaps: Gaps) -> None:
    """Zero every run of ``gaps``.

    Raises:
        RuntimeError: a GPU that has no memory for the index, or fails.
    """
    if not len(gaps):
        return
    if gaps.device.kind == "cpu":
        for start, nbytes in zip(gaps.local.tolist(), gaps.nbytes.tolist(), strict=True):
            ctypes.memset(start, 0, nbytes)
        return
    import torch

    base = int(gaps.local[0])
    end = int(gaps.local[-1] + gaps.nbytes[-1])
    device = torch.device(gaps.device.kind, gaps.device.index)
    # Beside the model's stream, which it need not wait for: no step writes these blocks any more.
    made: Any = torch.cuda.Stream
    stream = made(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        memory = torch.as_tensor(OnDevice(Memory(base, end - base, gaps.device)), device=device)
        fill_tensor(memory, gaps.local.view(np.int64) - base, gaps.nbytes.view(np.int64))
        stream.synchronize()


def fill_tensor(memory: Any, starts: I64, nbytes: I64) -> None:
    """Zero bytes ``[starts[i], starts[i] + nbytes[i])`` of a torch tensor of bytes, by one call.

    In units of the *grain*, the greatest common divisor of all sizes and distances.
    """
    import torch

    grain = int(np.gcd(np.gcd.reduce(nbytes), np.gcd.reduce(starts - starts[0])))
    grain = int(np.gcd(grain, _LARGEST_GRAIN))
    shift = int(starts[0]) % grain
    counts = nbytes // grain
    ends = np.cumsum(counts)
    index = np.arange(ends[-1]) + np.repeat((starts - shift) // grain - (ends - counts), counts)
    num_grains = (memory.numel() - shift) // grain
    rows = memory[shift : shift + num_grains * grain].view(num_grains, grain)
    rows.index_fill_(0, torch.from_numpy(index).to(memory.device), 0)
