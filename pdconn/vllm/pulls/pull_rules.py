"""What decides on the pulls of an engine: a part of its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from pdconn.vllm.blocks.kinds import may_lag


@dataclass(frozen=True, slots=True)
class PullRules:
    """The part of an engine's configuration that decides on pulls.

    Attributes:
        incarnation: this boot's name, part of every pull id.
        recompute: whether requests whose pull fails are recomputed; otherwise they fail.
        prefix_caching: whether a finished pull can be hit by the next request.
        max_model_len: tokens of the longest prompt that the engine takes.
        has_states: whether the model keeps recurrent states, of which there is one, after
            the last token that prefill has computed.
        num_lookahead: tokens at a prompt's end that are computed here and not pulled
            (:mod:`pdconn.vllm.speculation`).
        num_ranks: of this engine.
        is_awaiting: whether every rank's claim must be granted before a ticket is promised.
        has_lagging: whether states of a local hit may be of fewer tokens than full attention.
        is_lender: whether the engine computes prompts for others, too.
    """

    incarnation: str
    recompute: bool
    prefix_caching: bool
    max_model_len: int
    has_states: bool = False
    num_lookahead: int = 1
    num_ranks: int = 1
    is_awaiting: bool = False
    has_lagging: bool = False
    is_lender: bool = False

    @classmethod
    def from_config(
        cls, config: Any, kv_cache_config: Any, incarnation: str, *, has_store: bool, **more: Any
    ) -> Self:
        """From vLLM's ``config``, and from the fields in ``more``."""
        recompute = config.kv_transfer_config.kv_load_failure_policy == "recompute"
        parallel = config.parallel_config
        return cls(
            incarnation,
            recompute,
            bool(config.cache_config.enable_prefix_caching),
            config.model_config.max_model_len,
            num_ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            # A request whose lender is lost may be loaded from the store, but vLLM cannot take a
            # promise back: under this policy the request fails.  So a ticket is promised only when
            # every rank holds its claim.  Under the other policy the store is asked after the pull.
            is_awaiting=has_store and not recompute,
            has_lagging=may_lag(kv_cache_config),
            is_lender=bool(config.kv_transfer_config.is_kv_producer),
            **more,
        )
