"""Network cards and GPUs from /sys, and the card nearest to each GPU.

A GPU's nearest card shares the longest path of PCIe bridges with it; among several, one on the same
NUMA node; then the fastest::

    /sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/...          a switch
                                         ├── 0000:17:00.0/0000:18:00.0   GPU
                                         └── 0000:17:01.0/0000:19:00.0   mlx5_0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdconn.sidechannel.host_cards import listed_files, text_of

_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""VGA, 3D, other display, processing accelerator: the first six characters of a PCI class."""
_GPU_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_ETHERNET = "1"
"""The value of ``type`` of an Ethernet device (``ARPHRD_ETHER``)."""


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device, as UCX names it: ``mlx5_0:1``."""

    device: str
    port: int
    is_active: bool
    gbits_per_s: float
    numa: int | None
    pci: tuple[str, ...] = ()
    has_node: bool = True

    @property
    def name(self) -> str:
        """The device's name in ``UCX_NET_DEVICES``."""
        return f"{self.device}:{self.port}"


@dataclass(frozen=True, slots=True)
class NetDevice:
    """A network interface; ``gbits_per_s`` is None if the driver does not report it.

    ``is_paired``: a container's card, one end of a pair whose other end is elsewhere.
    """

    name: str
    is_up: bool
    gbits_per_s: float | None
    numa: int | None
    is_loopback: bool = False
    is_physical: bool = True
    is_paired: bool = False


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A GPU in PCI address order, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    index: int
    bus: str
    vendor: str
    numa: int | None
    pci: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Devices:
    """All devices of a host."""

    rdma: tuple[RdmaPort, ...] = ()
    nets: tuple[NetDevice, ...] = ()
    gpus: tuple[GpuDevice, ...] = ()

    @property
    def active_rdma(self) -> tuple[RdmaPort, ...]:
        """Ports with a link."""
        return tuple(port for port in self.rdma if port.is_active)

    @property
    def usable_nets(self) -> tuple[NetDevice, ...]:
        """Interfaces that lead to other hosts: no loopback, bridge or host's end of a pair.

        A container has no physical card, so its own end of a pair counts.
        """
        up = [net for net in self.nets if net.is_up and not net.is_loopback]
        return tuple([net for net in up if net.is_physical] or [net for net in up if net.is_paired])

    @property
    def names(self) -> set[str]:
        """All valid names for ``UCX_NET_DEVICES``."""
        with_ports = {port.name for port in self.rdma}
        return with_ports | {port.device for port in self.rdma} | {net.name for net in self.nets}


def read_devices(root: Path = Path("/")) -> Devices:
    """Read the devices below ``root/sys``; unreadable ones are skipped."""
    return Devices(
        tuple(_rdma_ports(root)), tuple(_net_devices(root / "sys/class/net")), _gpus(root)
    )


def _rdma_ports(root: Path) -> Iterator[RdmaPort]:
    nodes = root / "dev/infiniband"
    has_node = any(listed_files(nodes))
    for device in listed_files(root / "sys/class/infiniband"):
        numa, pci = _numa(device / "device"), _pci_path(device / "device")
        for port in listed_files(device / "ports"):
            active = text_of(port / "state").partition(":")[2].strip() == "ACTIVE"
            rate = _number(text_of(port / "rate").partition(" ")[0]) or 0.0
            number = int(port.name) if port.name.isdecimal() else 0
            yield RdmaPort(device.name, number, active, rate, numa, pci, has_node)


def _net_devices(folder: Path) -> Iterator[NetDevice]:
    for device in listed_files(folder):
        mbits = _number(text_of(device / "speed"))
        yield NetDevice(
            device.name,
            text_of(device / "operstate") in ("up", "unknown"),
            mbits / 1e3 if mbits is not None and mbits > 0 else None,
            _numa(device / "device"),
            is_loopback=device.name == "lo",
            is_physical=text_of(device / "type") == _ETHERNET and (device / "device").exists(),
            # The host's end of such a pair belongs to a bridge, which is its master.
            is_paired=text_of(device / "iflink") != text_of(device / "ifindex")
            and not (device / "master").exists(),
        )


def _gpus(root: Path) -> tuple[GpuDevice, ...]:
    found = []
    for device in listed_files(root / "sys/bus/pci/devices"):
        vendor = _GPU_VENDORS.get(text_of(device / "vendor"))
        if vendor is not None and text_of(device / "class")[:6] in _DISPLAY_CLASSES:
            found.append((device, vendor))
    return tuple(
        GpuDevice(index, device.name, vendor, _numa(device), _pci_path(device))
        for index, (device, vendor) in enumerate(found)
    )


def nearest_port(gpu: GpuDevice, ports: Sequence[RdmaPort]) -> RdmaPort | None:
    """The active port nearest to a GPU."""
    active = [port for port in ports if port.is_active]
    return max(active, key=lambda port: _nearness(gpu, port), default=None)


def _nearness(gpu: GpuDevice, port: RdmaPort) -> tuple[int, bool, float, str]:
    both = zip(gpu.pci, port.pci, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
    same = gpu.numa is not None and gpu.numa == port.numa
    return shared, same, port.gbits_per_s, port.name


def ucx_lines(devices: Devices) -> list[str]:
    """A ready line of UCX's variables per GPU, or for host memory without GPUs."""
    if devices.gpus:
        return [_gpu_line(gpu, devices) for gpu in devices.gpus]
    port = max(devices.active_rdma, key=lambda one: one.gbits_per_s, default=None)
    if port is not None:
        return [f"host memory: UCX_NET_DEVICES={port.name} UCX_TLS=rc,cma,tcp"]
    net = _fastest(devices)
    if net is None:
        return ["host memory: no network interface is up, so peers must be on this host"]
    return [f"host memory: UCX_NET_DEVICES={net.name} UCX_TLS=tcp,cma"]


def _gpu_line(gpu: GpuDevice, devices: Devices) -> str:
    node = "" if gpu.numa is None else f", NUMA node {gpu.numa}"
    where = f"GPU {gpu.index} ({gpu.vendor} {gpu.bus}{node})"
    copies = "cuda_copy,cuda_ipc" if gpu.vendor == "NVIDIA" else "rocm_copy,rocm_ipc"
    port = nearest_port(gpu, devices.rdma)
    if port is not None:
        return f"{where}: UCX_NET_DEVICES={port.name} UCX_TLS=rc,{copies}"
    net = _fastest(devices)
    if net is None:
        return f"{where}: no network interface is up, so peers must be on this host"
    return f"{where}: UCX_NET_DEVICES={net.name} UCX_TLS=tcp,{copies} (no RDMA device)"


def _fastest(devices: Devices) -> NetDevice | None:
    nets = devices.usable_nets
    return max(nets, key=lambda net: (net.gbits_per_s or 0.0, net.name), default=None)


def seen_devices(devices: Devices) -> str:
    """One line about the network devices."""
    named = [f"{port.name} {port.gbits_per_s:g} Gbit/s" for port in devices.active_rdma]
    for net in devices.usable_nets:
        speed = "" if net.gbits_per_s is None else f" {net.gbits_per_s:g} Gbit/s"
        named.append(f"{net.name}{speed or ' (speed unknown)'}")
    gpus = f"{len(devices.gpus)} GPUs" if devices.gpus else "no GPU"
    return f"{', '.join(named) or 'no network device that is up'}; {gpus}"


# --- files of /sys ------------------------------------------------------------------------


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _numa(device: Path) -> int | None:
    number = _number(text_of(device / "numa_node"))
    return None if number is None or number < 0 else int(number)


def _pci_path(device: Path) -> tuple[str, ...]:
    """The bridges from the root to a device, and the device itself."""
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return ()
    return tuple(part for part in parts if part.startswith("pci") or part.count(":") == 2)
