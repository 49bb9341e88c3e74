"""Requests for decode that readers may follow while they are computed.

A router that asks prefill and decode at once gives both a *stream*.  Blocks of full attention are
announced to readers of the stream once the step that has written them is over, and are pinned from
then on.  A preempted request keeps what was announced: it may get other blocks for the same tokens
later, and its ticket names those that were announced.

Blocks that a request has hit in the cache may be those of a step in flight, of another request:
vLLM caches blocks when it schedules a step.  So hits are announced with the first chunk.

::

    step               1              2              3 (last)
    written     ├──────────────┼──────────────┼───────┤
    announced         full           full        full, windows, states: the ticket
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from pdconn.protocol.errors import TicketError
from pdconn.protocol.messages import GrownBlocks
from pdconn.vllm.blocks.kinds import kinds_of
from pdconn.vllm.blocks.splits import Splits
from pdconn.vllm.blocks.transferred import TransferBlocks
from pdconn.vllm.lends.answers import BlockIds
from pdconn.vllm.patches.pool.pinned_blocks import block_ids_of
from pdconn.vllm.patches.request_writes import num_computed
from registration.references import AttentionKind


@dataclass(slots=True)
class GrowingRequest:
    """A request with a stream, until it is lent or leaves.

    Attributes:
        request: vLLM's ``Request``.
        is_open: whether the lender knows the stream.
        is_followed: whether a reader follows it, so that its blocks are announced.
        held: tokens that it held when it was scheduled, first or again, and what is loaded between
            steps: only behind those it is certain that its own steps have written; None before.
        preemptions: of it by then.
        announced: the engine's block ids by transferred group, from position 0 on.
    """

    request: Any
    stream: str
    is_open: bool = False
    is_followed: bool = False
    held: int | None = None
    preemptions: int = 0
    announced: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks of a request that are written and were not announced.

    Attributes:
        pins: the engine's ids.
        blocks: as they are described to peers.
    """

    request_id: str
    pins: list[int]
    blocks: tuple[GrownBlocks, ...]


class GrowingRequests:
    """Requests with a stream.  Only on the engine's thread.

    Args:
        config: vLLM's KV cache configuration.
        has_drafts: whether the engine has a drafter.  It may still write a step's blocks when the
            step's output is processed, so nothing is announced before the ticket.

    Attributes:
        manager: vLLM's ``KVCacheManager``, once it is bound.
    """

    def __init__(self, config: Any, *, has_drafts: bool = False) -> None:
        self.manager: Any = None
        self._config = config
        self._full = {
            number: int(group.kv_cache_spec.block_size)
            for number, (group, kind) in enumerate(
                zip(config.transfer_groups, kinds_of(config), strict=True)
            )
            if kind is AttentionKind.FULL and not has_drafts
        }
        self._requests: dict[str, GrowingRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add_request(self, request: Any, stream: str) -> None:
        """A request with a stream has entered the engine."""
        self._requests[request.request_id] = GrowingRequest(request, stream)

    def unopened(self) -> Iterator[GrowingRequest]:
        """Requests whose streams the lender does not know yet."""
        return (growing for growing in list(self._requests.values()) if not growing.is_open)

    def note_followed(self, request_id: str) -> None:
        """A reader follows the request."""
        if (growing := self._requests.get(request_id)) is not None:
            growing.is_followed = True

    def note_scheduled(self, names: Container[str]) -> list[Growth]:
        """A step is scheduled; returns requests that are scheduled for the first time."""
        begun = []
        for name, growing in self._requests.items():
            preemptions = growing.request.num_preemptions
            if name in names and (growing.held is None or preemptions != growing.preemptions):
                if growing.held is None and growing.is_open:
                    begun.append(Growth(name, [], ()))
                growing.held, growing.preemptions = growing.request.num_computed_tokens, preemptions
        return begun

    def take_growth(self, splits: Splits) -> list[Growth]:
        """What followed requests have written in the steps that are over, since the last call."""
        found = (
            self._growth(name, growing, splits)
            for name, growing in self._requests.items()
            if growing.is_followed and growing.is_open and _is_certain(growing)
        )
        return [growth for growth in found if growth is not None]

    def preempted(self) -> list[str]:
        """Requests that wait to be computed on, and of which blocks are pinned; newest first."""
        return [
            name
            for name, growing in reversed(self._requests.items())
            if growing.announced and growing.request.status is not RequestStatus.RUNNING
        ]

    def remove_request(self, request_id: str) -> GrowingRequest | None:
        """Forget a request: it is lent, has left the engine, or its lease has ended."""
        return self._requests.pop(request_id, None)

    def as_announced(self, request_id: str, ids: BlockIds) -> tuple[BlockIds, BlockIds]:
        """Blocks of a finished request as its ticket names them, and those that are not pinned yet.

        Raises:
            TicketError: more was announced than the request has blocks.
        """
        growing = self._requests.get(request_id)
        if growing is None:
            return ids, ids
        whole, unpinned = list(ids), list(ids)
        for group, known in growing.announced.items():
            if len(known) > len(ids[group]):
                expected = f"at least {len(known)} blocks, those that were announced"
                raise TicketError("remote_block_ids", expected, len(ids[group]))
            unpinned[group] = ids[group][len(known) :]
            whole[group] = known + unpinned[group]
        return tuple(whole), tuple(unpinned)

    def clear(self) -> None:
        """Forget all requests: the boot that they were announced for is over."""
        self._requests.clear()

    def _growth(self, name: str, growing: GrowingRequest, splits: Splits) -> Growth | None:
        written = num_computed(growing.request)
        if not any(
            written // size > len(growing.announced.get(group, ()))
            for group, size in self._full.items()
        ):
            return None
        ids = TransferBlocks(self._config, block_ids_of(self.manager, name)).ids
        pins: list[int] = []
        grown: list[GrownBlocks] = []
        for group, size in self._full.items():
            known = growing.announced.setdefault(group, [])
            fresh = ids[group][len(known) : written // size]
            if not fresh or not all(fresh):
                continue
            first, described = _described(splits, len(ids), group, len(known), fresh)
            grown.append(GrownBlocks(group, first, described))
            known += fresh
            pins += fresh
        return Growth(name, pins, tuple(grown)) if grown else None


def _is_certain(growing: GrowingRequest) -> bool:
    """Whether a step of the request is over since it was scheduled, first or again.

    Steps are over in their order, so those of other requests that it has hit blocks of are, too.
    """
    request = growing.request
    return (
        growing.held is not None
        and growing.preemptions == request.num_preemptions
        and num_computed(request) > growing.held
    )


def _described(
    splits: Splits, num_groups: int, group: int, first: int, ids: list[int]
) -> tuple[int, tuple[int, ...]]:
    """The first position and the ids of blocks of a group, as they are described to peers."""
    described = splits.described([ids if each == group else [] for each in range(num_groups)])
    ratio = len(described[group]) // len(ids)
    return first * ratio, tuple(described[group])
