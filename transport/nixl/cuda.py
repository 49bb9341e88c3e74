"""Binding a thread to the GPU whose memory it reads into.

UCX chooses a connection's transports on the thread that makes it.  Where that thread has no
current CUDA context, UCX leaves ``cuda_ipc`` out, and with it NVLink, without a word: reads
then go through the host.  A new thread has no context, whatever its process has done on others.

The driver is called by its C interface: ``torch.cuda.set_device`` does nothing where the
device is the thread's default one, so it would leave GPU 0 unbound.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

from transport.errors import BackendFailure
from transport.types import Device

_log = logging.getLogger(__name__)


def load_driver() -> Any:
    """CUDA's driver; None where there is none, as with AMD's GPUs."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def bind_thread(device: Device, load: Callable[[], Any] = load_driver) -> bool:
    """Make the primary context of ``device``, torch's own, the calling thread's; whether it is.

    Raises:
        BackendFailure: the driver refuses.
    """
    driver = load()
    if driver is None:
        _log.warning("pdconn: no CUDA driver, UCX may leave direct GPU transports out")
        return False
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    for call, *arguments in (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(handle), device.index),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle),
        ("cuCtxSetCurrent", context),
    ):
        failed = getattr(driver, call)(*arguments)
        if failed:
            raise BackendFailure(f"{call} for {device} failed with CUDA error {failed}")
    return True
