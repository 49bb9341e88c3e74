"""What an engine tells its peers of itself, and what it compares theirs with.

To its peers an engine is another boot after it has slept, and when what it lends is of other
weights than before.  Tickets of the boot before are refused at the first message, and what is
compared at the greeting is compared again.
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
        incarnation: names the first boot; later the present one.

    Attributes:
        content: what the bytes of a block mean, and what proved the weights when they were loaded;
            also where peers are not compared.
        weights: what proves them now; None before the workers are registered.
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
        """As it is now; there is none before the workers are registered."""
        assert self._welcome is not None
        return self._welcome

    def registered(self, handshakes: Mapping[tuple[int, int], PdHandshake]) -> bool:
        """Every worker is registered, anew if the engine has slept: whether that changes it."""
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
        """Weights may be others: whether peers must greet another boot.

        ``may_have_lent`` says whether tickets are on their way of what was computed before.
        """
        traits = self._traits(self.welcome)
        if traits == self.welcome.traits and not may_have_lent:
            return False
        self.incarnation = secrets.token_hex(8)
        self._become(self._by_weights(self.welcome, self.incarnation))
        return True

    def take_weights(self) -> dict[str, str] | None:
        """What workers compare lenders' weights with, if it has changed since the last call."""
        if self.weights is None or self.weights.of_engine == self._told:
            return None
        self._told = self.weights.of_engine
        return self._told

    @property
    def is_proven(self) -> bool:
        """Whether anything may be lent, by what is said of our KV."""
        return self._welcome is None or is_proven(self._welcome)

    @property
    def doubt(self) -> str:
        """Why this engine may pull nothing; empty if it may, and where peers are not compared."""
        if self.weights is None or not self.welcome.traits:
            return ""
        texts = self.weights.of_engine.values()
        return "; ".join(f"weights {text}" for text in texts if text.startswith(UNPROVEN))

    def _become(self, made: Welcome) -> None:
        self._welcome = made
        if not self.is_proven:
            log.warning(
                "pdconn: nothing is handed over, since nothing proves the weights (see weights_id "
                "in docs/compatibility.md): %s",
                made.traits[WEIGHTS],
            )

    def _by_weights(self, welcome: Welcome, incarnation: str) -> Welcome:
        return Welcome.of(self._engine_id, incarnation, self._traits(welcome), welcome.ranks)

    def _traits(self, welcome: Welcome) -> dict[str, str]:
        """By the weights that our KV is of now; none where peers are not compared."""
        if not welcome.traits or self.weights is None:
            return welcome.traits
        return {**welcome.traits, **self.weights.of_kv}


def is_proven(welcome: Welcome) -> bool:
    """Whether an engine may lend anything, by what it says of its KV."""
    return not welcome.traits.get(WEIGHTS, "").startswith(UNPROVEN)
