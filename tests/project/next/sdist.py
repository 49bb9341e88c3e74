"""Files of vLLM that its wheels lack, such as its own tests: out of its source distribution.

They are fetched when a test runs, and none is kept in this repository.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.project.next.tree import NotHad, environment, pip_download

_DOWNLOAD_S = 300.0
_BACKEND = """
from pathlib import Path


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    made = Path(metadata_directory) / "vllm-0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(Path("PKG-INFO").read_text())
    return made.name
"""
"""Stands in for setuptools while pip downloads.  pip asks a source distribution's build backend
for metadata before it hands the file over; vLLM's would have to run its ``setup.py``, which needs
CUDA's tools.  So nothing of what is downloaded runs."""


def download(version: str, into: Path) -> None:
    """Let pip download vLLM's source distribution.

    Raises:
        NotHad: with what pip said last.
    """
    with tempfile.TemporaryDirectory() as folder:
        backend = Path(folder) / "setuptools"
        backend.mkdir()
        (backend / "__init__.py").touch()
        (backend / "build_meta.py").write_text(_BACKEND, encoding="utf-8")
        pip_download(
            f"vllm=={version}",
            *("--no-binary", ":all:", "--no-build-isolation", "--dest", str(into)),
            env=environment(None, Path(folder)),
            timeout_s=_DOWNLOAD_S,
        )


def obtain(
    version: str,
    names: Sequence[str],
    work: Path,
    *,
    fetch: Callable[[str, Path], None] = download,
) -> list[Path]:
    """Files of vLLM's source distribution, unpacked below ``work``, and kept there.

    Args:
        version: of vLLM, such as 0.32.0.
        names: paths within vLLM's repository.
        work: where they are kept.
        fetch: puts the source distribution of a version into a folder.

    Raises:
        NotHad: it cannot be fetched, or lacks a file.
    """
    root = work / f"vllm-{version}"
    if not all((root / name).is_file() for name in names):
        work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=work) as made:
            fetch(version, Path(made))
            found = list(Path(made).glob("vllm-*.tar.gz"))
            if len(found) != 1:
                names_of = [path.name for path in Path(made).iterdir()]
                raise NotHad(f"vllm=={version}: expected one source distribution, got {names_of}")
            _unpack(found[0], version, names, root)
    return [root / name for name in names]


def _unpack(source: Path, version: str, names: Sequence[str], root: Path) -> None:
    with tarfile.open(source) as opened:
        for name in names:
            try:
                member = opened.getmember(f"vllm-{version}/{name}")
            except KeyError as error:
                raise NotHad(f"{source.name}: it has no {name}") from error
            content = opened.extractfile(member)
            if content is None:
                raise NotHad(f"{source.name}: {name} is no file")
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
