"""vLLM looks at a class of models in this process, not in one of its own.

That imports vLLM and torch anew, 10 s for each class on a machine where none was looked at before.
Importing this module imports vLLM (7 s).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm.model_executor.models import registry


@contextmanager
def inspected_here() -> Iterator[None]:
    """As long as the context lasts."""
    with mock.patch.object(registry, "_run_in_subprocess", _looked_at):
        yield


def _looked_at(look: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM imports
        return look()
