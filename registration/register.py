"""One worker's KV memory, pinned.

Pinning is per allocation, never per layer: a cross-layer cache of 60 layers is one
region.  A transport cannot unpin a single region, so whoever pins memory with it owns
it, and unpins by closing it::

    with RegisteredKVMemory(transport, made.references, made.owners) as memory:
        greet(memory.address, memory.references)

The order at the end matters: first the transport lets go of the pages, then the
tensors that own them are dropped.  A NIC must never hold pages that have gone back to
an allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Self

from registration.references import KVCacheReferences, RegistrationError
from transport import Memory, Transport
from transport.closing import Closing


class OverlappingMemory(RegistrationError):
    """Two allocations share bytes but are not one and the same."""


class RegistrationClosed(RuntimeError):
    """The memory was unpinned before this call."""


class RegisteredKVMemory(Closing):
    """KV memory that peers can read and reads can land in, from construction to ``close``.

    It owns ``transport`` from the call on: also when construction fails, in which
    case some regions may be pinned already, so the transport is closed.  Like the
    transport it belongs to one thread at a time.

    Args:
        transport: a fresh transport; nothing else is registered with it.
        references: describe the memory; one region is pinned for each distinct
            allocation in it.
        owners: whatever keeps that memory alive (tensors); held until ``close``.

    Raises:
        RegistrationError: the references describe no memory.
        OverlappingMemory: two allocations overlap; they are not merged.
        TransportError: the transport refused a region.
    """

    def __init__(
        self, transport: Transport, references: KVCacheReferences, owners: Sequence[object]
    ) -> None:
        self._transport = transport
        self._references = references
        self._owners = tuple(owners)
        self._closed = False
        try:
            self._register()
        except BaseException:
            self.close()
            raise

    @property
    def references(self) -> KVCacheReferences:
        """What the memory looks like; true also after ``close``."""
        return self._references

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The pinned regions."""
        return self._references.memories()

    @property
    def transport(self) -> Transport:
        """The transport that pinned the memory.

        Raises:
            RegistrationClosed: after ``close``.
        """
        self._check_open()
        return self._transport

    @property
    def address(self) -> bytes:
        """All that a peer needs to read this memory.

        Raises:
            RegistrationClosed: after ``close``.
        """
        return self.transport.address()

    def close(self) -> None:
        """Unpin by closing the transport, then let go of the owners.  Later calls do nothing.

        If the transport does not close (a read can still land), the owners are kept and
        the call may be repeated.  A transport that its thread closed before is fine.
        """
        if not self._closed:
            self._transport.close()
            self._closed = True
            self._owners = ()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def _check_open(self) -> None:
        if self._closed:
            raise RegistrationClosed("this KV memory is not registered any more")

    def _register(self) -> None:
        memories = self.memories
        if not memories:
            raise RegistrationError("the references describe no memory")
        by_address = sorted(
            memories, key=lambda memory: (memory.device.kind, memory.device.index, memory.base)
        )
        for lower, upper in pairwise(by_address):
            if lower.device == upper.device and upper.base < lower.end:
                raise OverlappingMemory(
                    f"[{lower.base:#x}, {lower.end:#x}) and [{upper.base:#x}, {upper.end:#x}) "
                    f"overlap on {lower.device}"
                )
        self._transport.register(memories)
