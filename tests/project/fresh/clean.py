"""A clone and an environment in which nothing of this machine is left, but for the way out.

Standard library only: ``make fresh`` runs it before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

KEPT = (
    # Which certificates and proxies lead to the package index is a trait of the network.
    "CURL_CA_BUNDLE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE",
    "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy",
    "LANG", "TERM",
)  # fmt: skip
"""Variables of this machine that a clean environment has, too."""


def clean_environment(ours: Mapping[str, str], home: Path) -> dict[str, str]:
    """A new user's environment: no setting of pip, no virtual environment, an empty home.

    Args:
        ours: this process's variables.
        home: an empty folder.
    """
    kept = {name: ours[name] for name in KEPT if name in ours}
    path = [
        folder
        for folder in ours.get("PATH", os.defpath).split(os.pathsep)
        if not (Path(folder).parent / "pyvenv.cfg").exists()
    ]
    return {
        **kept,
        "PATH": os.pathsep.join(path),
        "HOME": str(home),
        # Without this pip reads the files of the whole machine and of its administrator.
        "PIP_CONFIG_FILE": os.devnull,
    }


def clone_to(source: Path, clone: Path) -> None:
    """Clone what ``source`` has committed.

    Raises:
        CalledProcessError: git fails; it has printed why.
    """
    # No hard links: nothing that the clone does may reach the checkout.
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", source, clone], check=True)


def uncommitted(source: Path) -> list[str]:
    """Changes that a clone does not have, as git lists them."""
    shown = subprocess.run(
        ["git", "-C", source, "status", "--porcelain"], check=True, capture_output=True, text=True
    )
    return shown.stdout.splitlines()


def copy_tree(source: Path, folder: Path) -> None:
    """Copy the files of a checkout that git does not ignore, as they are now."""
    listed = subprocess.run(
        ["git", "-C", source, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True, capture_output=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        file = source / name
        if file.is_file():  # one that was removed is listed until that is committed
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
