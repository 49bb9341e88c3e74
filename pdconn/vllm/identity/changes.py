"""What follows in an engine's scheduler when its weights may be others."""

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
    """Hears of changes (:mod:`pdconn.vllm.patches.engine_calls`), and passes them on.

    Args:
        greeting: what peers are told.
        parts: of the scheduler's half.
        serve: tells peers of ``greeting`` as it is then.
    """

    def __init__(
        self, greeting: Greeting, parts: Sequence[SchedulerPart], serve: Callable[[], None]
    ) -> None:
        self._greeting, self._parts, self._serve = greeting, parts, serve

    def watch_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to see when nothing is kept of what was computed before."""
        watch_resets(block_pool, after=self._was_reset)

    def _was_reset(self, is_reset: bool) -> None:
        if is_reset:
            self._compare_anew(EngineWeights.was_reset)

    def computed(self) -> None:
        """There is KV of the present weights."""
        if self._greeting.weights is not None:
            self._greeting.weights.computed()

    def weights_changed(self, call: str) -> None:
        """A call by this name may change the weights.

        What is lent was computed with others, and so was what tickets are for that came before.
        """
        log.info("pdconn: weights may be others from now on: call=%s", shown(call))
        # The last first: lending takes nothing back while others, as saves, use blocks.
        for part in reversed(self._parts):
            part.weights_changed()
        may_have_lent = any(part.lends for part in self._parts)
        self._compare_anew(lambda weights: weights.changed(call), may_have_lent)

    def weights_reloaded(self, path: str | None, since: float) -> None:
        """The model was read from files, of which we know what they are."""
        self._compare_anew(lambda weights: weights.reloaded(path, since))

    def weights_named(self, version: str) -> None:
        """A trainer gave the weights a version."""
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
