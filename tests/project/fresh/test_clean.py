"""The environment of ``make fresh`` has nothing of this machine but the way to the index."""

from __future__ import annotations

import os
from pathlib import Path

from tests.project.fresh.clean import clean_environment

OURS = {
    "HOME": "/home/somebody",
    "PIP_FIND_LINKS": "/wheels",
    "PIP_EXTRA_INDEX_URL": "file:///more",
    "PIP_CERT": "/etc/ssl/certs/ca.pem",
    "PYTHONPATH": "/elsewhere",
    "VIRTUAL_ENV": "/venv",
    "VLLM_HOST_IP": "10.0.0.1",
    "PDCONN_SECRET": "something",
    "UCX_TLS": "tcp",
    "https_proxy": "http://proxy:3128",
}


def test_settings_of_pip_python_vllm_and_pdconn_are_left_behind(tmp_path: Path) -> None:
    env = clean_environment(OURS, tmp_path)
    assert env.pop("PATH") == os.defpath
    assert env == {
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_CERT": "/etc/ssl/certs/ca.pem",
        "https_proxy": "http://proxy:3128",
    }


def test_a_virtual_environment_is_taken_out_of_the_path(tmp_path: Path) -> None:
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").touch()
    path = f"{tmp_path}/venv/bin{os.pathsep}/usr/bin"
    assert clean_environment({"PATH": path}, tmp_path)["PATH"] == "/usr/bin"
