"""``make fresh``: the demo and a minute of engine tests, on a machine as it comes.

A clone in a new folder called ``pdconn``, a new HOME, and pip without configuration files,
find-links and extra indexes: what somebody has who clones the project and types ``make demo``.
Then the control: without the build of NIXL that the older requirements.txt had left out, doctor,
demo and engine must fail, each naming the command that mends it, and that command must mend it.

With ``--container`` the same in a container that has Debian's Python, git, make and nothing else,
as a user who is not root (as root on Debian: it installs a Docker Engine if there is none).

Exit status 0: all of that is so.  1: it is not, and what is wrong is said.  2: no container.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.project.fresh.clean import clean_environment, clone_to, uncommitted
from tests.project.fresh.container import CLONE, NoContainer, plain_debian

ROOT = Path(__file__).resolve().parents[3]
AGREE = re.compile(r"^\d+ answers: all agree with one engine alone$", re.MULTILINE)
ENGINE_TESTS = ("tests/vllm/engines/test_pair.py", "-k", "one_after_another or descriptor")
"""About a minute of them."""
_ANNOUNCED = re.compile(r"^pip downloads about ([\d.]+) GB", re.MULTILINE)
_DOWNLOADED = re.compile(r"installed; downloaded ([\d.]+) GB$", re.MULTILINE)
_OFF_BY = 0.15
"""How far the announced size of the download may be from what pip says, as a part of it."""


class NotFresh(Exception):
    """What a new user would have met."""


class Clone:
    """Runs commands in a clone, as somebody who has just made it.

    Args:
        folder: where the clone lies, on this machine or in a container.
        environment: all variables of its commands; None in a container, which has its own.
        within: put in front of each command, such as ``docker exec NAME``.
    """

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str] | None,
        within: Sequence[str] = (),
    ) -> None:
        self._folder = None if within else folder
        self._environment = environment
        self._within = tuple(within)
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """A line with the seconds since the start."""
        print(f"fresh: [{time.monotonic() - self._began:4.0f} s] {text}", flush=True)

    def run(self, *command: str) -> tuple[int, str]:
        """Exit status and output, which is shown meanwhile."""
        self.say(" ".join(command))
        said = []
        with subprocess.Popen(
            [*self._within, *command], cwd=self._folder, env=self._environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        ) as running:  # fmt: skip
            assert running.stdout is not None
            for line in running.stdout:
                print(line, end="", flush=True)
                said.append(line)
        return running.returncode, "".join(said)

    def expect(self, *command: str) -> str:
        """The output of a command that succeeds.

        Raises:
            NotFresh: it fails.
        """
        status, said = self.run(*command)
        if status:
            raise NotFresh(f"{' '.join(command)} ended with exit status {status}, expected 0")
        return said


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all of it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make fresh", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--keep", action="store_true", help="leave the folder, and name it")
    parser.add_argument("--container", action="store_true", help="in a container of plain Debian")
    args = parser.parse_args(arguments)
    left_out = uncommitted(ROOT)
    if left_out:
        print(f"fresh: {len(left_out)} changes are not committed, so the clone lacks them")
    if args.container:
        return _in_a_container()
    folder = Path(tempfile.mkdtemp(prefix="fresh-"))
    try:
        return _here(folder)
    finally:
        if args.keep:
            print(f"fresh: left in {folder}")
        else:
            shutil.rmtree(folder)


def _here(folder: Path) -> int:
    home, here = folder / "home", folder / "pdconn"
    home.mkdir()
    clone_to(ROOT, here)
    return check_all(Clone(here, clean_environment(os.environ, home)))


def _in_a_container() -> int:
    try:
        with plain_debian(ROOT, lambda text: print(f"fresh: {text}", flush=True)) as within:
            return check_all(Clone(CLONE, None, within))
    except NoContainer as error:
        print(f"fresh: no container: {error}", file=sys.stderr)
        return 2


def check_all(clone: Clone) -> int:
    """Everything, in turn; returns the exit code."""
    try:
        check_demo(clone)
        check_engines(clone)
        check_control(clone)
    except NotFresh as error:
        print(f"fresh: FAILED: {error}", file=sys.stderr)
        return 1
    clone.say("a new user's machine runs it, and the control fails as it should")
    return 0


def check_demo(clone: Clone) -> None:
    """``make demo`` as the first command.

    Raises:
        NotFresh: answers differ, or what it says of the download is wrong.
    """
    said = clone.expect("make", "demo")
    if AGREE.search(said) is None:
        raise NotFresh("make demo did not say that all answers agree")
    announced, downloaded = _ANNOUNCED.search(said), _DOWNLOADED.search(said)
    if announced is None or downloaded is None:
        raise NotFresh("make demo did not say what it downloads")
    promised, came = float(announced[1]), float(downloaded[1])
    if abs(promised - came) > _OFF_BY * came:
        raise NotFresh(f"make demo announced {promised} GB, and pip downloaded {came} GB")


def check_engines(clone: Clone) -> None:
    """Doctor, the pinned requirements against each other, and engine tests.

    Raises:
        NotFresh: one of them fails.
    """
    clone.expect(".venv/bin/pdconn", "doctor")
    pytest = (".venv/bin/python", "-m", "pytest", "-q", "-m", "not matrix")
    clone.expect(*pytest, "tests/project/fresh")
    clone.expect(*pytest, *ENGINE_TESTS)


def check_control(clone: Clone) -> None:
    """With the requirements of before, everything must fail, and say what mends it.

    Raises:
        NotFresh: something did not fail, or did not name the command, or that mends nothing.
    """
    python = ".venv/bin/python"
    asks = "from transport.nixl.builds import *; print(torch_cuda_major() or '')"
    major = clone.expect(python, "-c", asks).strip()
    if not major:
        clone.say("no control: this torch is a CPU build, beside which any build of NIXL loads")
        return
    build = f"nixl-cu{major}"
    version = clone.expect(
        python, "-c", f"import importlib.metadata as m; print(m.version('{build}'))"
    )
    remedy = f"pip install {build}=={version.strip()}"
    clone.expect(python, "-m", "pip", "uninstall", "-q", "-y", build)
    for command in (
        (".venv/bin/pdconn", "doctor"),
        (".venv/bin/pdconn", "demo"),
        (python, "-m", "tests.project.fresh.broken_engine", ".work/broken"),
    ):
        status, said = clone.run(*command)
        if not status:
            raise NotFresh(f"the control: {' '.join(command)} succeeded without {build}")
        if remedy not in said:
            raise NotFresh(f"the control: {' '.join(command)} did not name {remedy!r}")
    clone.expect(python, "-m", *remedy.split())
    clone.expect(".venv/bin/pdconn", "doctor")


if __name__ == "__main__":
    sys.exit(main())
