"""What a benchmark needs of a machine, and whether it is there."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Need:
    """``words`` for people; ``met`` looks."""

    words: str
    met: Callable[[], bool]


def package(module: str) -> Need:
    """A Python package that can be imported as ``module``."""
    return Need(f"the package {module}", lambda: find_spec(module) is not None)


def library(file: str) -> Need:
    """A shared library that the loader finds, such as ``libibverbs.so.1``."""

    def loads() -> bool:
        try:
            ctypes.CDLL(file)
        except OSError:
            return False
        return True

    return Need(file, loads)


ROOT = Need("root", lambda: os.geteuid() == 0)
GPU = Need("an NVIDIA GPU", lambda: Path("/dev/nvidia0").exists())
ENGINE = package("vllm")
NIXL = package("nixl")
