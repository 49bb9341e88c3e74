"""The effects of calls that may have changed an engine's weights, in its scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pdconn.vllm.identity.updates import EngineWeights
from pdconn.vllm.patches.cache_resets import watch_resets
from transport.errors import shown

if TYPE_CHECKING:
    from pdconn.vllm.identity.greeting import Greeting
    from pdconn.vllm.scheduler_part import SchedulerPart

log = logging.getLogger(__name__)


class WeightChanges:
    """Is notified of changes (:mod:`pdconn.vllm.patches.engine_calls`), and passes them on.

    Args:
        greeting: the engine's Welcome.
        parts: of the scheduler's half.
        serve: serves the present Welcome to peers.
    """

    def __init__(
        self, greeting: Greeting, parts: Sequence[SchedulerPart], serve: Callable[[], None]
    ) -> None:
        self._greeting, self._parts, self._serve = greeting, parts, serve

    def watch_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to be notified when its cache is reset."""
        watch_resets(block_pool, after=self._was_reset)

    def _was_reset(self, is_reset: bool) -> None:
        if is_reset:
            self._compare_anew(EngineWeights.was_reset)

    def note_computed(self) -> None:
        """Record that KV of the present weights exists."""
        if self._greeting.weights is not None:
            self._greeting.weights.note_computed()

    def weights_changed(self, call: str) -> None:
        """The method named ``call`` may change the weights: end leases, drop tickets."""
        log.info("pdconn: weights may have changed: call=%s", shown(call))
        # Lending last: it keeps its leases while other parts, as saves, use blocks.
        for part in reversed(self._parts):
            part.weights_changed()
        may_have_lent = any(part.lends for part in self._parts)
        self._compare_anew(lambda weights: weights.changed(call), may_have_lent)

    def weights_reloaded(self, path: str | None, since: float) -> None:
        """The weights were read from ``path``, or from where they were, after ``since``."""
        self._compare_anew(lambda weights: weights.reloaded(path, since))

    def weights_named(self, version: str) -> None:
        """A trainer has given the weights a version."""
        self._compare_anew(lambda weights: weights.named(version))

    def _compare_anew(
        self, change: Callable[[EngineWeights], None], may_have_lent: bool = False
    ) -> None:
        weights = self._greeting.weights
        if weights is None:  # no worker is registered yet
            return
        change(weights)
        for part in self._parts:
            part.set_doubt(self._greeting.doubt)
        if self._greeting.compare_anew(may_have_lent):
            self._serve()
