"""Which weights an engine has after calls that may have changed them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from pdconn.protocol.compat import DRAFT, WEIGHTS
from pdconn.vllm.identity.weights import Weights, weights_of


class EngineWeights:
    """The weights that an engine computes with, and those of its KV, as traits.

    ::

        loaded ── a call that may change them ──► unproven ── reload_weights ──► files, commit
                                                         └─── weight_version ──► version

    After a change the engine may have KV of the former weights, so its KV is unproven until its
    prefix cache is reset.  A trainer that pauses with ``clear_cache`` resets it first.

    Args:
        config: vLLM's configuration.
        traits: the engine's, as its ranks loaded it.
    """

    def __init__(self, config: Any, traits: Mapping[str, str]) -> None:
        self._config = config
        self._model = config.model_config
        self._texts = {name: traits[name] for name in (WEIGHTS, DRAFT + WEIGHTS) if name in traits}
        self._is_empty, self._is_stale = True, False

    def note_computed(self) -> None:
        """Record that KV of the present weights exists."""
        self._is_empty = False

    def was_reset(self) -> None:
        """The prefix cache was reset: there is no KV."""
        self._is_empty, self._is_stale = True, False

    def changed(self, call: str) -> None:
        """The method named ``call`` may have changed the weights."""
        self._is_stale = self._is_stale or not self._is_empty
        doubt = Weights((), f"{call} may have changed them in place, and named no weight_version")
        self._texts = dict.fromkeys(self._texts, doubt.trait)

    def reloaded(self, path: str | None, since: float) -> None:
        """The model's weights, without its drafter's, were read from files after ``since``."""
        if path is not None:
            self._model = copy.copy(self._model)
            self._model.model, self._model.model_weights, self._model.revision = path, "", None
        found = weights_of(self._model, self._config.load_config, named=None, since=since)
        self._texts[WEIGHTS] = found.trait

    def named(self, version: str) -> None:
        """A trainer has given the weights a version, which is a further proof."""
        proof = f"version:{hashlib.sha256(version.encode()).hexdigest()[:32]}"
        for name, text in self._texts.items():
            kept = [
                one for one in Weights.from_trait(text).proofs if not one.startswith("version:")
            ]
            self._texts[name] = Weights((proof, *kept)).trait

    @property
    def of_engine(self) -> dict[str, str]:
        """Traits of the weights, which lenders' are compared with."""
        return dict(self._texts)

    @property
    def of_kv(self) -> dict[str, str]:
        """Traits of the weights of our KV."""
        doubt = Weights((), "the prefix cache was not reset when they were changed")
        return {
            name: doubt.trait if self._is_stale and Weights.from_trait(text).proofs else text
            for name, text in self._texts.items()
        }
