"""A part of the connector's half in the scheduler's process, by the names of vLLM's hooks.

:class:`~pdconn.vllm.scheduler.PdScheduler` hands every hook to each part that is there::

    BlockWaits   which requests wait for blocks, and what gives way to them   where it lends
    Pulling      what a ticket brings                                         where it pulls
    PullSpans    traces of pulls                                              where they are traced
    Lending      what is lent to others                                       where it lends
    Storing      what is saved and loaded                                     with a store

A part that has nothing to do in a hook leaves it out.  Hooks of which vLLM has no equal are at
the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from pdconn.protocol.messages import Welcome
    from pdconn.vllm.blocks.splits import Splits
    from pdconn.vllm.blocks.transferred import TransferBlocks
    from pdconn.vllm.identity.greeting import Greeting
    from pdconn.vllm.metadata import PdMetadata

Matched = tuple[int | None, bool]
"""vLLM's: tokens behind the local hit that a connector brings, None to ask again; and whether they
come between steps."""

NOTHING: Matched = (0, False)
ASK_AGAIN: Matched = (None, False)


class SchedulerPart:
    """Does nothing in any hook.  All on the engine's thread, without system calls."""

    fills_blocks = False
    """Whether it brings KV into blocks that vLLM has allocated."""

    lends = False
    """Whether tickets of it may be on their way."""

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether it completes a local hit of which some groups have less than others."""
        return False

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``, before any request."""

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in."""

    def set_xfer_handshake_metadata(self, greeting: Greeting, splits: Splits) -> None:
        """Every worker is registered, anew if the engine has slept.

        ``splits`` says which blocks they describe.
        """

    def on_new_request(self, request: Any) -> None:
        """A request entered the engine."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """What it brings of a request behind ``num_computed_tokens`` that are held.

        Returns:
            None leaves the request to the next part; anything else is vLLM's answer.
        """
        return None

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: TransferBlocks,
        num_external_tokens: int,
        *,
        is_promised: bool,
    ) -> None:
        """A request got blocks, of which vLLM does not compute ``num_external_tokens`` tokens.

        ``is_promised``: they are this part's to bring.
        """

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Where the tokens that a request loads come from, if it is this part that knows."""
        return {}

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """A step is scheduled: add what the workers are to do in it."""

    def update_connector_output(self, connector_output: Any) -> None:
        """Workers reported.  vLLM frees the blocks of what failed after this."""

    def request_finished(
        self, request: Any, blocks: TransferBlocks, num_computed: int
    ) -> dict[str, Any] | None:
        """A request is about to leave the engine.

        ``num_computed`` of its tokens were computed; 0 if it was aborted, rejected or failed.

        Returns:
            ``kv_transfer_params`` of its answer, if this part has some.
        """
        return None

    def has_pending_push_work(self) -> bool:
        """Whether an engine that was asked to stop must wait for it."""
        return False

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events since the last call."""
        return ()

    def shutdown(self) -> None:
        """Stop its threads, close its sockets.  Idempotent."""

    # Not of vLLM's

    def note_answer(self, request: Any) -> None:
        """vLLM was answered, by any part, and allocates blocks next, if it can."""

    def is_load_optional(self, request_id: str) -> bool:
        """Whether it brings what a request waits for, and the request is computed if that fails."""
        return False

    def serve(self, welcome: Welcome, splits: Splits) -> None:
        """``welcome`` is what peers are told of this engine from now on."""

    def set_doubt(self, doubt: str) -> None:
        """Why nothing may be pulled from now on; empty if it may."""

    def weights_changed(self) -> None:
        """What was computed before, here or elsewhere, may be of other weights than ours now."""

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        return {}

    def take_gauges(self) -> dict[str, int]:
        """Gauges that have changed since the last call."""
        return {}
