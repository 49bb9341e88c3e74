"""A part of the connector in the scheduler's process, by the names of vLLM's hooks.

:class:`~pdconn.vllm.scheduler.PdScheduler` passes every hook to each part of an engine::

    BlockWaits   requests that wait for blocks, and what ends for them   if it lends
    Pulling      pulls by tickets                                        if it pulls
    PullSpans    traces of pulls                                         if they are traced
    Lending      leases                                                  if it lends
    Storing      saves and loads                                         with a store
    Keeping      what sessions keep                                      unless that is off

A part implements the hooks that it needs.  Hooks that vLLM does not have are at the end.
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
"""As in vLLM: tokens behind the local hit that a connector loads (None: ask again), and whether it
loads them between steps."""

NOTHING: Matched = (0, False)
ASK_AGAIN: Matched = (None, False)


class SchedulerPart:
    """Does nothing in any hook.  All hooks run on the engine's thread, without system calls."""

    fills_blocks = False
    """Whether it writes KV into blocks that vLLM has allocated."""

    lends = False
    """Whether it issues tickets."""

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether it completes a local hit of which some groups hold less than others."""
        return False

    def bind_kv_cache_manager(self, manager: Any) -> None:
        """Take vLLM's ``KVCacheManager``, before any request."""

    def bind_gpu_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, to pin blocks in."""

    def set_xfer_handshake_metadata(self, greeting: Greeting, splits: Splits) -> None:
        """Take the workers' memory, again after a sleep; ``splits``: which blocks it describes."""

    def on_new_request(self, request: Any) -> None:
        """A request has entered the engine."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Matched | None:
        """Tokens of a request that it loads behind the ``num_computed_tokens`` that are held.

        Returns:
            The answer to vLLM; None leaves the request to the next part.
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
        """A request has blocks; vLLM does not compute ``num_external_tokens`` of its tokens.

        ``is_promised``: this part has promised to load them.
        """

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Sources of the tokens that a request loads, if this part loads them."""
        return {}

    def build_connector_meta(self, scheduler_output: Any, metadata: PdMetadata) -> None:
        """A step is scheduled: add commands for the workers."""

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers have reported.  vLLM frees the blocks of failed loads after this."""

    def request_finished(
        self, request: Any, blocks: TransferBlocks, num_computed: int
    ) -> dict[str, Any] | None:
        """A request is about to leave the engine.

        ``num_computed`` of its tokens were computed; 0 if it was aborted, rejected or failed.

        Returns:
            ``kv_transfer_params`` for its answer, or None.
        """
        return None

    def has_pending_push_work(self) -> bool:
        """Whether an engine that is shutting down must wait for it."""
        return False

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events since the last call."""
        return ()

    def shutdown(self) -> None:
        """Stop its threads, close its sockets.  Idempotent."""

    # Hooks that vLLM does not have

    def note_matched_tokens(self, request: Any) -> None:
        """``get_num_new_matched_tokens`` was answered, by any part; vLLM allocates blocks next."""

    def is_load_optional(self, request_id: str) -> bool:
        """Whether a request waits for a load of this part, and is computed if the load fails."""
        return False

    def serve(self, welcome: Welcome, splits: Splits) -> None:
        """Serve ``welcome``, the description of this engine, to peers from now on."""

    def set_doubt(self, doubt: str) -> None:
        """Set why nothing may be pulled from now on; empty if pulls are allowed."""

    def weights_changed(self) -> None:
        """Our weights may have changed: KV that was computed before may be of other weights."""

    def take_counts(self) -> dict[str, int]:
        """Counts since the last call."""
        return {}

    def take_gauges(self) -> dict[str, int]:
        """Gauges that have changed since the last call."""
        return {}
