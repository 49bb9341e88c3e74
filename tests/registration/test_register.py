"""Registered memory: one region per allocation, opened once, closed once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from registration import (
    AttentionKind,
    GroupMemory,
    KVCacheReferences,
    LayerMemory,
    OverlappingMemory,
    RegisteredKVMemory,
    RegistrationClosed,
    RegistrationError,
    StateChunk,
    build_kv_cache_references,
)
from registration.allocation.allocate import HeadMajor, KVCacheAllocation, allocate
from registration.allocation.contents import AttentionTensor
from registration.allocation.layers import GroupPages, LayerPages
from registration.allocation.strided import Axis
from tests.fakes.layouts import described_bytes
from transport import (
    BackendFailure,
    Device,
    Memory,
    PeerId,
    ReadId,
    Settled,
    Spans,
    Transport,
    TransportClosed,
)
from transport.testing.inprocess.transport import InProcessNetwork, InProcessTransport


class RecordingTransport(Transport):
    """Records its calls and moves nothing."""

    def __init__(self, *, refuses: bool = False, cannot_close: bool = False) -> None:
        self.refuses = refuses
        self.cannot_close = cannot_close
        self.registered: list[tuple[Memory, ...]] = []
        self.num_closes = 0

    @property
    def name(self) -> str:
        return "recording"

    def register(self, memories: Sequence[Memory]) -> None:
        self.registered.append(tuple(memories))
        if self.refuses:
            raise BackendFailure("no more memory keys")

    def address(self) -> bytes:
        return b"recording:%d" % sum(map(len, self.registered))

    def connect(self, address: bytes) -> PeerId:
        raise NotImplementedError

    def disconnect(self, peer: PeerId) -> None:
        raise NotImplementedError

    def read(self, peer: PeerId, spans: Spans) -> ReadId:
        raise NotImplementedError

    def poll(self, read: ReadId) -> Settled | None:
        raise NotImplementedError

    def describe(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        if self.cannot_close:
            raise TransportClosed("the agent is stuck")
        self.num_closes += 1


def layer(name: str, base: int, nbytes: int = 640, device: Device | None = None) -> LayerMemory:
    memory = Memory(base, nbytes, device or Device())
    return LayerMemory(name, memory, 0, 64, nbytes // 64, (StateChunk(64),))


def references(*layers: LayerMemory) -> KVCacheReferences:
    return build_kv_cache_references([GroupMemory(AttentionKind.STATE, None, 16, layers)])


def cross_layer_cache(
    num_layers: int, head_major: HeadMajor = HeadMajor.NEVER
) -> KVCacheAllocation:
    axes = (Axis.BLOCK, Axis.HEAD, Axis.TOKEN, Axis.CONTENT)
    content = AttentionTensor((3, 2, 4, 2), axes, (0, 1, 2, 3), torch.float16)
    layers = tuple(
        LayerPages(f"layers.{index}", content, content.page_nbytes) for index in range(num_layers)
    )
    group = GroupPages(AttentionKind.FULL, None, 4, layers)
    return allocate([group], 3, head_major=head_major)


def test_a_cross_layer_cache_is_one_region_however_many_layers_it_has() -> None:
    made = cross_layer_cache(60)
    (owner,) = made.owners
    transport = RecordingTransport()
    with RegisteredKVMemory(transport, made.references, made.owners) as memory:
        assert len(made.references.groups[0].layers) == 60
        assert transport.registered == [(Memory(owner.data_ptr(), owner.nbytes),)]
        assert memory.memories == transport.registered[0]


def test_each_distinct_allocation_is_one_region() -> None:
    transport = RecordingTransport()
    described = references(
        layer("a", 0x1000), layer("b", 0x2000), layer("a2", 0x1000), layer("touching", 0x1280)
    )
    RegisteredKVMemory(transport, described, ())
    assert transport.registered == [(Memory(0x1000, 640), Memory(0x2000, 640), Memory(0x1280, 640))]


@pytest.mark.parametrize("base", [0x1000 - 1, 0x1000, 0x1000 + 639])
def test_allocations_that_overlap_are_refused_and_never_merged(base: int) -> None:
    transport = RecordingTransport()
    described = references(layer("a", 0x1000), layer("b", base, 704))
    with pytest.raises(OverlappingMemory, match=f"{base:#x}.* overlap on cpu:0"):
        RegisteredKVMemory(transport, described, ())
    assert transport.registered == []


def test_equal_addresses_on_two_devices_do_not_overlap() -> None:
    transport = RecordingTransport()
    devices = (Device("cuda", 0), Device("cuda", 1), Device("cpu", 0))
    described = references(
        *(layer(str(device), 0x1000, device=device) for device in devices),
    )
    RegisteredKVMemory(transport, described, ())
    assert len(transport.registered[0]) == 3


def test_references_and_address_are_there_while_open() -> None:
    described = references(layer("a", 0x1000))
    with RegisteredKVMemory(RecordingTransport(), described, ()) as memory:
        assert memory.references is described
        assert memory.address == b"recording:1"
        assert isinstance(memory.transport, RecordingTransport)


def test_closing_closes_the_transport_once_however_often_it_is_called() -> None:
    transport = RecordingTransport()
    with RegisteredKVMemory(transport, references(layer("a", 0x1000)), ()) as memory:
        memory.close()
        memory.close()
    assert transport.num_closes == 1


def test_nothing_of_the_transport_is_handed_out_after_close() -> None:
    memory = RegisteredKVMemory(RecordingTransport(), references(layer("a", 0x1000)), ())
    memory.close()
    with pytest.raises(RegistrationClosed):
        _ = memory.address
    with pytest.raises(RegistrationClosed):
        _ = memory.transport
    with pytest.raises(RegistrationClosed), memory:
        pass
    assert memory.references.groups[0].layers == ("a",)


def test_owners_live_until_close_and_no_longer() -> None:
    owner = np.zeros(640, np.int8)
    alive = weakref.ref(owner)
    described = references(layer("a", owner.ctypes.data))
    memory = RegisteredKVMemory(RecordingTransport(), described, [owner])
    del owner
    gc.collect()
    assert alive() is not None
    memory.close()
    gc.collect()
    assert alive() is None


def test_owners_outlive_a_transport_that_does_not_let_go() -> None:
    owner = np.zeros(640, np.int8)
    alive = weakref.ref(owner)
    transport = RecordingTransport(cannot_close=True)
    memory = RegisteredKVMemory(transport, references(layer("a", owner.ctypes.data)), [owner])
    del owner
    with pytest.raises(TransportClosed):
        memory.close()
    gc.collect()
    assert alive() is not None
    transport.cannot_close = False
    memory.close()
    assert transport.num_closes == 1


def test_a_region_that_is_refused_leaves_nothing_pinned() -> None:
    transport = RecordingTransport(refuses=True)
    with pytest.raises(BackendFailure):
        RegisteredKVMemory(transport, references(layer("a", 0x1000)), ())
    assert transport.num_closes == 1


def test_references_to_no_memory_are_refused() -> None:
    transport = RecordingTransport()
    with pytest.raises(RegistrationError, match="no memory"):
        RegisteredKVMemory(transport, KVCacheReferences((), ()), ())
    assert transport.num_closes == 1


def test_what_one_cache_holds_can_be_read_into_another_by_references_alone() -> None:
    theirs, ours = cross_layer_cache(3, HeadMajor.REQUIRE), cross_layer_cache(3)
    for number, view in enumerate(theirs.views.values()):
        assert isinstance(view, torch.Tensor)
        view.copy_(torch.arange(1, view.numel() + 1).view(view.shape) + 100 * number)
    network = InProcessNetwork()
    with (
        RegisteredKVMemory(
            InProcessTransport(network, "p0"), theirs.references, theirs.owners
        ) as lender,
        RegisteredKVMemory(
            InProcessTransport(network, "d0"), ours.references, ours.owners
        ) as reader,
    ):
        remote = {label: at for at, label in described_bytes(lender.references).items()}
        local = {label: at for at, label in described_bytes(reader.references).items()}
        pairs = np.array([(local[label], at) for label, at in remote.items()], np.uint64)
        peer = reader.transport.connect(lender.address)
        ones = np.ones(len(pairs), np.uint64)
        read = reader.transport.read(peer, Spans(pairs[:, 0].copy(), pairs[:, 1].copy(), ones))
        settled = reader.transport.poll(read)
        assert settled is not None
        assert settled.ok
    for name, view in theirs.views.items():
        assert torch.equal(ours.views[name], view)
    assert not torch.equal(
        ours.allocations[0].tensor.view(-1), theirs.allocations[0].tensor.view(-1)
    )
