"""The engine's Welcome, and the traits that it compares with those of peers.

After a sleep, and when its weights have changed, an engine has another incarnation: peers refuse
its former tickets at the first message, and compare traits again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from pdconn.protocol.compat import UNPROVEN, WEIGHTS
from pdconn.protocol.messages import Welcome
from pdconn.vllm.identity.updates import EngineWeights
from pdconn.vllm.metadata import PdHandshake, joint_traits, welcome_of

log = logging.getLogger(__name__)


class Greeting:
    """An engine's present Welcome.

    Args:
        config: vLLM's configuration.
        incarnation: the first one.

    Attributes:
        incarnation: the present one.
        content: all traits at the start, also if peers are not compared.
        weights: the present traits of the weights; None before the workers are registered.
    """

    def __init__(self, config: Any, incarnation: str) -> None:
        self._config = config
        self._engine_id = config.kv_transfer_config.engine_id
        self.incarnation = incarnation
        self._welcome: Welcome | None = None
        self._told: dict[str, str] = {}
        self.content: dict[str, str] = {}
        self.weights: EngineWeights | None = None

    @property
    def welcome(self) -> Welcome:
        """The present Welcome, once the workers are registered."""
        assert self._welcome is not None
        return self._welcome

    def registered(self, handshakes: Mapping[tuple[int, int], PdHandshake]) -> bool:
        """Take the workers' handshakes, again after a sleep; whether the Welcome has changed."""
        if self.weights is None:
            self.content = joint_traits([one.content for one in handshakes.values()])
            self.weights = EngineWeights(self._config, self.content)
            self._told = self.weights.of_engine
        made = welcome_of(self._engine_id, self.incarnation, handshakes)
        if self._by_weights(made, self.incarnation) == self._welcome:
            return False
        if self._welcome is not None:
            self.incarnation = secrets.token_hex(8)
        self._become(self._by_weights(made, self.incarnation))
        return True

    def compare_anew(self, may_have_lent: bool) -> bool:
        """Take changed weights; whether there is another incarnation now.

        ``may_have_lent``: tickets may exist for KV of the former weights.
        """
        traits = self._traits(self.welcome)
        if traits == self.welcome.traits and not may_have_lent:
            return False
        self.incarnation = secrets.token_hex(8)
        self._become(self._by_weights(self.welcome, self.incarnation))
        return True

    def take_weights(self) -> dict[str, str] | None:
        """Traits that workers compare with lenders', if they have changed since the last call."""
        if self.weights is None or self.weights.of_engine == self._told:
            return None
        self._told = self.weights.of_engine
        return self._told

    @property
    def is_proven(self) -> bool:
        """Whether the weights of our KV are proven, so that it may be lent."""
        return self._welcome is None or is_proven(self._welcome)

    @property
    def doubt(self) -> str:
        """Why this engine may not pull; empty if it may, or if peers are not compared."""
        if self.weights is None or not self.welcome.traits:
            return ""
        texts = self.weights.of_engine.values()
        return "; ".join(f"weights {text}" for text in texts if text.startswith(UNPROVEN))

    def _become(self, made: Welcome) -> None:
        self._welcome = made
        if not self.is_proven:
            log.warning(
                "pdconn: nothing is handed over: the weights are not proven (see weights_id in "
                "docs/compatibility.md): %s",
                made.traits[WEIGHTS],
            )

    def _by_weights(self, welcome: Welcome, incarnation: str) -> Welcome:
        return Welcome.in_our_version(
            self._engine_id, incarnation, self._traits(welcome), welcome.ranks
        )

    def _traits(self, welcome: Welcome) -> dict[str, str]:
        """The traits with the weights of our KV; none if peers are not compared."""
        if not welcome.traits or self.weights is None:
            return welcome.traits
        return {**welcome.traits, **self.weights.of_kv}


def is_proven(welcome: Welcome) -> bool:
    """Whether the weights of an engine's KV are proven, so that it may be lent."""
    return not welcome.traits.get(WEIGHTS, "").startswith(UNPROVEN)
