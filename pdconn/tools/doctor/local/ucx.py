"""Checks UCX: the installed libraries, and the transports that NIXL's UCX may use.

UCX runs in a child process (``python -m pdconn.tools.doctor.local.ucx``): it stays in a process
once loaded, and a broken one may end the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdconn.tools.doctor.findings import Finding, fault, one_line, warning
from pdconn.tools.doctor.local.devices import Devices

ASK_TIMEOUT_S = 60.0
_SYSTEM_FOLDERS = (
    "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
    "/usr/local/lib", "/opt/ucx/lib", "/opt/hpcx/ucx/lib",
)  # fmt: skip
_ACROSS_HOSTS = ("tcp", "rc", "dc", "ud", "ib", "gga", "srd")
"""Prefixes of UCX's transports that reach other hosts."""
_RDMA = ("rc", "dc", "ud", "srd", "gga")


@dataclass(frozen=True, slots=True)
class UcxFile:
    """A ``libucp``, and its owner: ``nixl``, ``libucx`` or ``system``."""

    owner: str
    path: str


@dataclass(frozen=True, slots=True)
class UcxAnswer:
    """UCX's report after NIXL started it; ``error`` if it did not start."""

    nixl: str = ""
    ucx: str = ""
    transports: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class UcxFacts:
    """``answer`` is None if NIXL was not started; ``settings`` are the ``UCX_…`` variables."""

    files: tuple[UcxFile, ...]
    answer: UcxAnswer | None
    settings: Mapping[str, str]
    preload: str = ""


def read_ucx(
    environ: Mapping[str, str], answer: UcxAnswer | None, packages: Path | None = None
) -> UcxFacts:
    """The files, the variables, and an answer from :func:`ask_ucx`."""
    packages = packages or Path(sysconfig.get_path("platlib"))
    settings = {key: value for key, value in environ.items() if key.startswith("UCX_")}
    files = tuple(_files(packages, environ.get("LD_LIBRARY_PATH", "")))
    return UcxFacts(files, answer, settings, environ.get("LD_PRELOAD", ""))


def _files(packages: Path, search: str) -> Iterator[UcxFile]:
    for path in sorted(packages.glob("nixl_cu*.libs/libucp*.so*")):
        yield UcxFile("nixl", str(path))
    for path in sorted(packages.glob("libucx/lib/libucp.so.0")):
        yield UcxFile("libucx", str(path))
    seen = set()
    for folder in (*filter(None, search.split(":")), *_SYSTEM_FOLDERS):
        for path in sorted(Path(folder).glob("libucp.so.0")):
            real = str(path.resolve())
            if real not in seen and not real.startswith(str(packages.resolve())):
                seen.add(real)
                yield UcxFile("system", str(path))


def seen_ucx(facts: UcxFacts) -> list[str]:
    """Lines about what is installed and would be used."""
    owners = [f"{file.owner}'s" for file in facts.files]
    lines = [f"UCX libraries: {', '.join(owners) or 'none'}"]
    if facts.answer is not None and facts.answer.error is None:
        listed = ", ".join(facts.answer.transports) or "nothing"
        lines.append(f"NIXL {facts.answer.nixl} with UCX {facts.answer.ucx} may use {listed}")
    if facts.settings:
        lines.append(" ".join(f"{key}={value}" for key, value in sorted(facts.settings.items())))
    return lines


def judge_ucx(facts: UcxFacts, devices: Devices, transport: str = "nixl") -> Iterator[Finding]:
    """Findings that keep UCX from starting, from the network, or from the fastest card."""
    yield from _several(facts, transport)
    absent = [*_net_devices(facts.settings.get("UCX_NET_DEVICES"), devices)]
    yield from absent
    answer = facts.answer
    if answer is None or absent:  # UCX does not start with a missing device
        return
    # NIXL did not start: the settings are the first suspects.
    if answer.error is not None:
        message = f"{answer.error}{_with(facts.settings)}"
        remedy = "run python -c 'import nixl._api' in this environment, and install what it lacks"
        if facts.settings:
            remedy = f"unset {' '.join(sorted(facts.settings))}, or correct them"
        yield fault("ucx.start", "NIXL", message, remedy)
        return
    yield from _reach(answer.transports, facts.settings, devices)


def _with(settings: Mapping[str, str]) -> str:
    listed = ", ".join(f"{key}={value}" for key, value in sorted(settings.items()))
    return f"; with {listed}" if listed else ""


def _several(facts: UcxFacts, transport: str) -> Iterator[Finding]:
    if any(name in facts.preload for name in ("libucp", "libuct", "libucs", "libucm")):
        message = f"LD_PRELOAD loads another UCX into every process: {facts.preload}"
        yield fault("ucx.preload", "LD_PRELOAD", message, "unset LD_PRELOAD, or take UCX out of it")
    owners = {file.owner for file in facts.files}
    if transport == "auto" and {"nixl", "libucx"} <= owners:
        message = (
            "transport auto may take NIXL's UCX or libucx, and two engines that choose "
            "differently cannot exchange KV"
        )
        remedy = 'set "transport" to "nixl" or "ucx" on every engine'
        yield warning("ucx.several", "transport", message, remedy)
    off = facts.settings.get("UCX_MEM_EVENTS") == "n"
    off |= facts.settings.get("UCX_MEM_MMAP_HOOK_MODE") == "none"
    if transport == "ucx" and off:
        message = (
            "UCX_MEM_EVENTS or UCX_MEM_MMAP_HOOK_MODE switches off UCX's registration cache, "
            "without which transport ucx does not start"
        )
        remedy = "unset UCX_MEM_EVENTS UCX_MEM_MMAP_HOOK_MODE"
        yield fault("ucx.cache", "UCX_MEM_*", message, remedy)


def _net_devices(given: str | None, devices: Devices) -> Iterator[Finding]:
    if not given or given == "all":
        return
    for word in given.removeprefix("^").split(","):
        if word.strip() in devices.names or word.strip() == "all":
            continue
        nets = [net.name for net in devices.usable_nets]
        good = [port.name for port in devices.active_rdma] or nets
        known = ", ".join(sorted({*good, *nets})) or "none"
        message = f"expected devices of this host ({known}), got {word!r}"
        remedy = f"export UCX_NET_DEVICES={','.join(good)}" if good else "unset UCX_NET_DEVICES"
        yield fault("ucx.net-devices", "UCX_NET_DEVICES", message, remedy)


def _reach(
    transports: Sequence[str], settings: Mapping[str, str], devices: Devices
) -> Iterator[Finding]:
    tls = settings.get("UCX_TLS")
    why = "" if tls is None else f" with UCX_TLS={tls}"
    names = {name.partition("/")[0] for name in transports}
    if not transports:
        message = f"expected at least one transport, got none{why}"
        yield fault("ucx.transports", "UCX", message, "unset UCX_TLS UCX_NET_DEVICES")
        return
    across = [
        one for one in transports if one.startswith(_ACROSS_HOSTS) and not one.endswith("/lo")
    ]
    if not across:
        message = f"no transport reaches another host{why}: only {', '.join(transports)}"
        remedy = "allow tcp, or rc with RDMA, in UCX_TLS and a card in UCX_NET_DEVICES"
        yield warning("ucx.one-host", "UCX_TLS", message, remedy)
    if devices.active_rdma and not any(name.startswith(_RDMA) for name in names):
        ports = ", ".join(port.name for port in devices.active_rdma)
        message = f"RDMA ports {ports} are active, and UCX uses none of them{why}"
        remedy = "give the container /dev/infiniband, and allow rc in UCX_TLS"
        yield warning("ucx.no-rdma", "UCX", message, remedy)
    vendors = {gpu.vendor for gpu in devices.gpus}
    wanted = {"NVIDIA": "cuda_copy", "AMD": "rocm_copy"}
    for vendor in sorted(vendors):
        if wanted[vendor] not in names:
            message = f"expected {wanted[vendor]} for GPU memory of {vendor}, got none{why}"
            remedy = f"allow {wanted[vendor]} in UCX_TLS, and install a UCX that has it"
            yield warning("ucx.no-gpu", "UCX", message, remedy)


def ask_ucx(
    options: Mapping[str, Mapping[str, str]],
    environ: Mapping[str, str],
) -> UcxAnswer:
    """Start NIXL in a child process, as an engine of this environment would.

    Args:
        options: ``backend_options`` of the engine.
        environ: its environment variables.
    """
    command = [sys.executable, "-m", "pdconn.tools.doctor.local.ucx", json.dumps(options)]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return UcxAnswer(error=f"NIXL did not start within {ASK_TIMEOUT_S:g} s")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        return UcxAnswer(**{**answer, "transports": tuple(answer["transports"])})
    except (IndexError, ValueError, TypeError, KeyError):
        last = one_line((done.stderr or done.stdout)[-200:]) or "it printed nothing"
        return UcxAnswer(error=f"NIXL ended its process with status {done.returncode}: {last}")


def _answer(options: Mapping[str, Mapping[str, str]]) -> dict[str, object]:
    """In the child: start NIXL, and query its UCX."""
    from transport.errors import TransportError
    from transport.nixl.agent_options import backend_params
    from transport.nixl.possible import possible_transports
    from transport.nixl.transport import NixlTransport

    try:
        with NixlTransport("doctor", backend_options=options) as opened:
            facts = opened.describe()
            found = possible_transports(backend_params(("UCX",), options)["UCX"])
    except (TransportError, ValueError) as error:
        return {"transports": [], "error": one_line(error)}
    return {"nixl": facts["nixl"], "ucx": facts["ucx"], "transports": list(found)}


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # UCX's own shutdown may take seconds, or fail
