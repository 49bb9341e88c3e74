"""Build the two images that ``compose.yaml`` runs, and look at what is in them."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from tests.project.docker.debian import DockerFailed, Say, builder, run
from tests.project.docker.stack import DOCKER, load

_BUILD_TIMEOUT_S = 1500.0

#: Run by the image's own Python: what its wheels installed, and what should not be there.
_LOOK = """
import importlib.metadata, json, os, shutil
wheels, packed = 0, []
for one in importlib.metadata.distributions():
    for file in one.files or ():
        path = one.locate_file(file)
        if not str(file).endswith(".pyc") and os.path.isfile(path):
            wheels += os.stat(path).st_size
names = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "as", "make", "nvcc")
for folder, _, files in os.walk("/"):
    if not folder.startswith(("/proc", "/sys", "/usr/share/python-wheels")):
        packed += [os.path.join(folder, file) for file in files if file.endswith(".whl")]
print(json.dumps({"wheels_nbytes": wheels, "packed": packed,
                  "compilers": [name for name in names if shutil.which(name)]}))
"""


@dataclass(frozen=True)
class Image:
    """What an image holds.

    Attributes:
        nbytes: its size, as Docker counts it: all layers, unpacked.
        wheels_nbytes: files that its Python packages installed, without bytecode.
        compilers: programs on its path that compile, assemble or link.
        packed: wheels that lie there as they were downloaded.
    """

    name: str
    nbytes: int
    wheels_nbytes: int
    compilers: tuple[str, ...]
    packed: tuple[str, ...]


def our_images() -> dict[str, str]:
    """Image -> Dockerfile, of the services that are built."""
    services = load("compose.yaml").services.values()
    return {one["image"]: one["build"]["dockerfile"] for one in services if "build" in one}


def build(base: str, say: Say) -> None:
    """Build both on ``base``, at once; what the builder has kept is not made again.

    Raises:
        DockerFailed: a build fails.
    """
    arguments = ["--network", "host", "--build-arg", f"BASE={base}"]
    # Another index than the public one, such as the index of torch's CPU builds.
    if index := os.environ.get("TORCH_INDEX"):
        arguments += ["--build-arg", f"TORCH_INDEX={index}"]

    def build_one(name: str, dockerfile: str) -> None:
        say(f"building {name}")
        words = [builder(), "build", *arguments, "-f", DOCKER.parent / dockerfile, "-t", name]
        before = _image_id(name)
        run([*words, DOCKER.parent], _BUILD_TIMEOUT_S, env={**os.environ, "DOCKER_BUILDKIT": "1"})
        if before is not None and before != _image_id(name):
            with suppress(DockerFailed):  # a container of a fleet that runs may need it still
                run(["docker", "rmi", before])

    # Much of a build is waiting for downloads.
    with ThreadPoolExecutor() as pool:
        list(pool.map(build_one, *zip(*our_images().items(), strict=True)))


def _image_id(name: str) -> str | None:
    found = run(["docker", "images", "--quiet", "--no-trunc", name]).split()
    return found[0] if found else None


def look(name: str) -> Image:
    """What is in an image."""
    nbytes = int(run(["docker", "image", "inspect", "--format", "{{.Size}}", name]))
    words = ["docker", "run", "--rm", "--user", "0", "--entrypoint", "python3", name, "-c", _LOOK]
    seen = json.loads(run(words))
    return Image(
        name, nbytes, seen["wheels_nbytes"], tuple(seen["compilers"]), tuple(seen["packed"])
    )
