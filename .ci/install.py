"""Installs what pdconn needs into a virtual environment: `make venv` runs this.

    python3 .ci/install.py VENV --torch torch==2.13.0 [--torch-index URL]

It says first what pip is going to download and how large that is, then what pip does, and at the
end how much it was.  torch comes first, with its dependencies; requirements.txt pins everything
else and is installed without dependency resolution (why: see its first lines).  Of the two builds
of NIXL that it pins, the one is installed that NIXL imports beside this torch.

Standard library only, since nothing is installed yet.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements.txt"

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""torch's own index of CPU builds: the public index has builds for CUDA only, on Linux on x86."""

# Measured with Python 3.11 on Linux on x86-64; `make fresh` compares the first with what pip says.
CUDA_TORCH_GB, CPU_TORCH_GB, PINNED_GB = 2.74, 0.2, 0.66
CUDA_DISK_GB, CPU_DISK_GB = 7.5, 4.2

_DOWNLOADING = re.compile(r"Downloading (\S+).*?\(([\d.]+) (kB|MB|GB)\)")
_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}
_SHOWN_FROM = 20e6
"""Bytes of a package from which its download is a line of its own."""
_PATIENCE_S = 10.0
"""Without news for so long, a line says what pip still does."""


class InstallFailed(Exception):
    """pip ended with an error, which it has printed."""


class Progress:
    """Shows what pip does, and counts what it downloads.

    Attributes:
        nbytes: downloaded so far, by pip's own words.
    """

    def __init__(self) -> None:
        self.nbytes = 0.0
        self._began = time.monotonic()
        self._doing = "starting"
        self._last = time.monotonic()

    def say(self, text: str) -> None:
        """A line with the seconds since the start."""
        self._last = time.monotonic()
        print(f"[{self._last - self._began:4.0f} s] {text}", flush=True)

    def say_step(self, title: str) -> None:
        """A line that begins a step, with what was downloaded before it."""
        self.say(f"{title} ({self.nbytes / 1e9:.2f} GB so far)" if self.nbytes else title)

    def read(self, line: str) -> None:
        """Take one line of pip's output."""
        found = _DOWNLOADING.search(line)
        if found is not None and not found[1].endswith(".metadata"):
            nbytes = float(found[2]) * _UNITS[found[3]]
            self.nbytes += nbytes
            self._doing = f"downloading {found[1].rpartition('/')[2]}"
            if nbytes >= _SHOWN_FROM:
                self.say(f"{self._doing} ({nbytes / 1e6:.0f} MB)")
        elif line.startswith("Installing collected packages"):
            self._doing = "unpacking what was downloaded"
            self.say(self._doing)

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """While pip is silent, show that it still works."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(1.0):
                if time.monotonic() - self._last >= _PATIENCE_S:
                    self.say(f"still {self._doing}")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Install; returns the exit code."""
    parser = argparse.ArgumentParser(prog="install.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("--torch", default="torch==2.13.0", help="as pip takes it")
    parser.add_argument("--torch-index", default="", help="where torch comes from, as a URL")
    args = parser.parse_args(arguments)
    pip = [str(args.venv / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    index = ["--index-url", args.torch_index] if args.torch_index else []
    progress = Progress()
    try:
        check_library()
        version = torch_version(pip, args.torch, index)
        if version is not None:  # else all that is large is there already
            print(announcement(version), flush=True)
        progress.say_step(f"1 of 3: {args.torch}")
        _install(pip, [args.torch, *index], progress)
        progress.say_step("2 of 3: what requirements.txt pins")
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as pins:
            pins.write(pins_beside(PINS.read_text(encoding="utf-8"), torch_cuda_major(args.venv)))
            pins.flush()
            _install(pip, ["--no-deps", "-r", pins.name], progress)
        progress.say_step("3 of 3: pdconn")
        _install(pip, ["--no-deps", "--no-build-isolation", "-e", str(ROOT)], progress)
    except InstallFailed as error:
        print(f"not installed: {error}", file=sys.stderr)
        return 1
    progress.say(f"installed; downloaded {progress.nbytes / 1e9:.2f} GB")
    return 0


def check_library() -> None:
    """Fail before gigabytes are downloaded: vLLM's CPU build loads a library of the system.

    Raises:
        InstallFailed: it is not there.
    """
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise InstallFailed(
            "vLLM's CPU build needs libnuma.so.1: install libnuma1 (Debian, Ubuntu) or "
            "numactl-libs (Fedora, RHEL), as root"
        ) from None


def torch_version(pip: Sequence[str], torch: str, index: Sequence[str]) -> str | None:
    """The version of torch that pip would install, like ``2.13.0+cpu``; None if it is there.

    Nothing is installed.

    Raises:
        InstallFailed: pip finds none.
    """
    command = [
        *pip, "install", "--quiet", "--dry-run", "--no-deps",
        "--report", "-", torch, *index,
    ]  # fmt: skip
    asked = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if asked.returncode:
        raise InstallFailed(f"pip finds no {torch}; its own error is above")
    wanted = json.loads(asked.stdout)["install"]
    return str(wanted[0]["metadata"]["version"]) if wanted else None


def torch_cuda_major(venv: Path) -> int | None:
    """Major version of the CUDA that the installed torch is built for; None for a CPU build."""
    asks = "import runpy; from importlib.util import find_spec as f; from pathlib import Path as P;"
    asks += "t = runpy.run_path(P(f('torch').origin).parent / 'version.py'); print(t['cuda'] or '')"
    said = subprocess.run(
        [str(venv / "bin/python"), "-c", asks], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    return int(said.split(".")[0]) if said else None


def pins_beside(pins: str, cuda_major: int | None) -> str:
    """The pins without the build of NIXL that is not for this torch.

    Beside a CPU build of torch NIXL would take either, and prefers that for CUDA 13, whose OBJ
    back end needs a library that no wheel has.
    """
    other = "nixl-cu12" if cuda_major == 13 else "nixl-cu13"
    return "".join(line for line in pins.splitlines(True) if not line.startswith(f"{other}=="))


def announcement(version: str) -> str:
    """What is going to be downloaded, and the smaller way where there is one."""
    is_cpu = version.endswith("+cpu")
    torch_gb, disk_gb = (CPU_TORCH_GB, CPU_DISK_GB) if is_cpu else (CUDA_TORCH_GB, CUDA_DISK_GB)
    kind = "a CPU build" if is_cpu else "a build for CUDA, which also runs without a GPU"
    lines = [
        f"pip downloads about {torch_gb + PINNED_GB:.1f} GB and takes {disk_gb:.0f} GB of disk: "
        f"torch {version} ({kind}) {torch_gb:.1f} GB, everything else {PINNED_GB:.1f} GB."
    ]
    if not is_cpu and is_reachable(f"{TORCH_CPU_INDEX}/torch/"):
        lines.append(
            f"torch's CPU build makes it {CPU_TORCH_GB + PINNED_GB:.1f} GB and {CPU_DISK_GB:.0f} GB"
            f" of disk: stop with Ctrl-C and run make with TORCH_INDEX={TORCH_CPU_INDEX}"
        )
    return "\n".join(lines)


def is_reachable(url: str, timeout_s: float = 3.0) -> bool:
    """Whether a server answers there."""
    asked = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s):
            return True
    except (URLError, OSError, ValueError):
        return False


def _install(pip: Sequence[str], words: Sequence[str], progress: Progress) -> None:
    command = [*pip, "install", "--progress-bar", "off", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    said: list[str] = []
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=environment,
        ) as running,
        progress.heartbeat(),
    ):  # fmt: skip
        assert running.stdout is not None
        for line in running.stdout:
            said.append(line)
            progress.read(line)
    if running.returncode:
        sys.stderr.writelines(said[-20:])
        raise InstallFailed(f"pip ended with exit status {running.returncode}, see above")


if __name__ == "__main__":
    sys.exit(main())
