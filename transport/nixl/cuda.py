"""Binds a thread to the GPU whose memory it reads into.

UCX chooses a connection's transports on the thread that makes it.  If that thread has no current
CUDA context, UCX silently leaves out ``cuda_ipc``, and with it NVLink: reads go through the host.
A new thread has no context, even if other threads of its process have one.
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
    """The CUDA driver; None where there is none, as with AMD GPUs."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def bind_thread(device: Device, load: Callable[[], Any] = load_driver) -> bool:
    """Make torch's context of ``device``, the primary one, current on this thread; whether it is.

    Raises:
        BackendFailure: the driver refuses.
    """
    # By the driver's C interface: torch.cuda.set_device does nothing for the thread's default
    # device, so it would leave GPU 0 unbound.
    driver = load()
    if driver is None:
        _log.warning("pdconn: no CUDA driver: UCX may not use direct GPU transports")
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
