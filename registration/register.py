"""One worker's KV memory, registered with a transport.

Memory is registered per allocation, never per layer: a cross-layer cache of 60 layers is
one region.  A transport cannot unregister a single region, so the object that registers
memory owns the transport, and unregisters by closing it::

    with RegisteredKVMemory(transport, made.references, made.owners) as memory:
        send_hello(memory.address, memory.references)

The order at the end matters: first the transport releases the pages, then the tensors
that own them are dropped.  A NIC must never hold pages that have gone back to
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
    """Two allocations share bytes but are not identical."""


class RegistrationClosed(RuntimeError):
    """The memory was unregistered before this call."""


class RegisteredKVMemory(Closing):
    """KV memory that peers can read and reads can land in, from construction to ``close``.

    It owns ``transport`` from the call on, also when construction fails: some regions may
    be registered already then, so the transport is closed.  Like the transport it belongs
    to one thread at a time.

    Args:
        transport: a fresh transport; nothing else is registered with it.
        references: describe the memory; one region is registered for each distinct
            allocation in it.
        owners: the objects that keep that memory alive (tensors); held until ``close``.

    Raises:
        RegistrationError: the references describe no memory.
        OverlappingMemory: two allocations overlap.
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
        """The description of the memory; valid also after ``close``."""
        return self._references

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The registered regions."""
        return self._references.memories()

    @property
    def transport(self) -> Transport:
        """The transport that the memory is registered with.

        Raises:
            RegistrationClosed: after ``close``.
        """
        self._check_open()
        return self._transport

    @property
    def address(self) -> bytes:
        """Everything that a peer needs to read this memory.

        Raises:
            RegistrationClosed: after ``close``.
        """
        return self.transport.address()

    def close(self) -> None:
        """Unregister by closing the transport, then drop the owners.  Idempotent.

        If the transport does not close (a read can still land), the owners are kept and
        the call may be repeated.  A transport that is closed already is fine.
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
            raise RegistrationClosed("this KV memory was unregistered")

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
