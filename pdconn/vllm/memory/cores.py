"""The cores to which vLLM has bound a model on CPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping

_BIND = "VLLM_CPU_OMP_THREADS_BIND"


def bound_cores(
    own: set[int], parent: set[int], ranks: int, environ: Mapping[str, str] = os.environ
) -> set[int] | None:
    """The cores to which vLLM has bound the model's ranks; None where it has bound none.

    A rank knows its own binding; those of the others are in ``VLLM_CPU_OMP_THREADS_BIND``.  If they
    are unknown, all cores of the engine are returned.
    """
    if own >= parent:
        return None
    if ranks == 1:
        return own
    try:
        return own | _listed(environ.get(_BIND, ""))
    except ValueError:
        return parent


def _listed(text: str) -> set[int]:
    """Cores in vLLM's notation, with ``|`` between ranks.

    >>> sorted(_listed("0-2|8,10"))
    [0, 1, 2, 8, 10]
    """
    found: set[int] = set()
    for part in text.replace("|", ",").split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
