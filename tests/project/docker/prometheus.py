"""Debian's Prometheus, which reads the files that the one of ``compose.yaml`` reads."""

from __future__ import annotations

import copy
import json
import shutil
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.project.docker.debian import BASE, run


def programs(directory: Path) -> Path:
    """The folder of ``prometheus`` and ``promtool``; unpacked from Debian's package if need be.

    The package is not installed, which would start a service.

    Raises:
        DockerFailed: Debian's archive cannot be reached.
    """
    if (found := shutil.which("promtool")) and shutil.which("prometheus"):
        return Path(found).parent
    run(["apt-get", "update"])
    run(["apt-get", "download", "prometheus"], cwd=directory)
    (package,) = directory.glob("prometheus_*.deb")
    run(["dpkg", "-x", package, directory / "unpacked"])
    return directory / "unpacked/usr/bin"


def on_the_base_image(service: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The service ``prometheus`` with a program of this machine instead of an image's."""
    made = copy.deepcopy(dict(service))
    made |= {"image": BASE, "entrypoint": ["/opt/prometheus"]}
    made["volumes"] = [*made["volumes"], f"{folder / 'prometheus'}:/opt/prometheus:ro"]
    made.pop("profiles")
    made.pop("healthcheck")  # of a program that the base image has not
    return made


def asked(url: str, path: str) -> Any:
    """The data of an answer of Prometheus' API."""
    with urllib.request.urlopen(f"{url}/api/v1/{path}", timeout=10.0) as answer:
        return json.load(answer)["data"]
