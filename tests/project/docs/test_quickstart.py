"""Commands of the README and of ``docs/`` are run, as far as a machine without a GPU can.

Every ``bash`` fence counts.  What cannot run here is parsed by the program that would read
it: ``pdconn proxy`` by argparse, a ``--kv-transfer-config`` by us, and ``vllm serve`` by vLLM
(``test_docs_vllm``).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from pdconn.router.proxy_config import ProxyConfig
from pdconn.tools.cli.main import build_parser, main
from pdconn.vllm.config import ConfigError, Settings, read_settings
from tests.project.docs.generate import ROOT
from tests.project.docs.pages import Command, commands, every_page

COMMANDS = [command for page in every_page() for command in commands(page)]
OURS = [one for one in COMMANDS if one.words[:1] == ["pdconn"]]
STARTS = (["vllm", "serve"], ["python", "-m", "vllm.entrypoints.openai.api_server"])


def engine_words(command: Command) -> list[str] | None:
    """The options of a command that starts an engine; None of any other."""
    found = [command.words[len(one) :] for one in STARTS if command.words[: len(one)] == one]
    return found[0] if found else None


STARTED = [one for one in COMMANDS if engine_words(one) is not None]
SERVED = [one for one in STARTED if "--kv-transfer-config" in one.words]
SHELL = ("(umask", "export", "cd")

#: Cheap enough to be run for real; the others are parsed.
RUN = ("plan", "score", "--help")


def test_there_are_commands_of_every_kind() -> None:
    begun = {command.words[0] for command in COMMANDS}
    assert {"make", "pip", "vllm", "pdconn", "curl", "(umask", "export"} <= begun
    assert len(SERVED) >= 4, "prefill and decode, in README and quickstart"
    pages = {command.page for command in SERVED}
    assert pages >= {"README.md", "quickstart.md"}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_every_command_is_of_a_kind_that_is_checked(command: Command) -> None:
    first = command.words[0]
    if first == "make":
        assert f"\n{command.words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    elif first == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"]
        if command.words[1] == "freeze":  # what the next command must not move
            assert command.words[-2:] == [">", "installed.txt"]
            return
        assert command.words[1] == "install"
        ours, *others = command.words[2:]
        if "-c" in others:
            at = others.index("-c")
            assert others[at + 1] == "installed.txt"
            assert any(
                one.page == command.page and one.words[:2] == ["pip", "freeze"] for one in COMMANDS
            )
            del others[at : at + 2]
        extra = re.fullmatch(r"\.\[(\w+)\]", ours)
        if extra is not None:
            assert extra[1] in extras
            pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
            assert set(others) <= set(pinned)  # what it is tried with
        else:
            assert ours == "."
            (name,) = others  # the version that was tested, of those that are allowed
            assert name in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
            (allowed,) = [Requirement(one) for one in extras["engine"] if one.startswith("nixl")]
            assert name.removeprefix("nixl==") in allowed.specifier
    elif first == "curl":
        if "-d" in command.words:
            body = json.loads(command.words[command.words.index("-d") + 1])
            assert {"model", "prompt"} <= body.keys()
    elif first == "envoy":  # run by tests/examples/test_envoy.py
        assert command.words[1:] == ["-c", "examples/envoy/envoy.yaml"]
    else:
        assert command in OURS or command in STARTED or first in SHELL


@pytest.mark.parametrize("command", OURS, ids=str)
def test_our_commands_do_what_they_say(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = command.words[1:]
    if words[-1] == "--help":
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
    elif words[0] in RUN:
        assert main(words) == 0
        assert capsys.readouterr().out
    else:
        args = _parsed(words)
        if words[0] == "proxy":
            ProxyConfig.from_options(args.prefill, args.decode, fleet=args.fleet, port=args.port)


def test_our_commands_with_a_fault_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Negative control."""
    for words in (
        ["proxy", "--prefetch", "http://a:1"],
        ["plan", "--model"],
        ["bench", "transport"],
    ):
        with pytest.raises(SystemExit) as end:
            _parsed(words)
        assert end.value.code == 2
    capsys.readouterr()


def test_the_secret_is_made_as_engines_want_it(tmp_path: Path) -> None:
    made = [one for one in COMMANDS if one.page == "quickstart.md" and one.words[0] in SHELL]
    script = "\n".join(["set -e", *[one.text for one in made], 'echo "$PDCONN_SECRET_FILE"'])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30
    )
    path = done.stdout.strip()
    assert Path(path) == tmp_path / "pdconn.secret"
    settings = _settings({"side_channel_host": "10.0.0.1"}, {"PDCONN_SECRET_FILE": path})
    settings.security.require("10.0.0.1")
    Path(path).chmod(0o644)
    with pytest.raises(ConfigError, match="not world-readable"):
        _settings({}, {"PDCONN_SECRET_FILE": path})


@pytest.mark.parametrize("command", SERVED, ids=str)
def test_a_transfer_configuration_is_one_that_we_take(command: Command) -> None:
    config = transfer_config(command)
    assert config["kv_role"] in ("kv_producer", "kv_consumer", "kv_both")
    assert hasattr(import_module(config["kv_connector_module_path"]), "__getattr__")
    _settings(config.get("kv_connector_extra_config", {}))
    if config["kv_role"] == "kv_consumer":
        assert config["kv_load_failure_policy"] == "recompute"


# An example that a test has imported leaves its bytecode there.
EXAMPLES = [
    path
    for path in sorted((ROOT / "examples").rglob("*"))
    if path.is_file() and "__pycache__" not in path.parts
]
FILES = [*every_page(), *sorted((ROOT / "docker").glob("*.y*ml")), *EXAMPLES]
DECODES = re.compile(r'"kv_role": *"kv_(consumer|both)"')
RECOMPUTES = re.compile(r'"kv_load_failure_policy": *"recompute"')


def num_that_fail(text: str) -> int:
    """How many configurations of decode engines have vLLM's default: fail the request."""
    return max(0, len(DECODES.findall(text)) - len(RECOMPUTES.findall(text)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_configuration_of_decode_recomputes_what_fails(path: Path) -> None:
    """A user copies it: with vLLM's default, a request fails whose pull fails."""
    assert num_that_fail(path.read_text(encoding="utf-8")) == 0


def test_a_configuration_of_decode_with_vllm_s_default_is_found() -> None:
    """Negative control: each page that shows one, without the policy."""
    shown = [path for path in FILES if DECODES.search(path.read_text(encoding="utf-8"))]
    assert {path.name for path in shown} >= {
        "README.md",
        "quickstart.md",
        "compose.gpu.yaml",
        "decode.yaml",
    }
    assert all(
        num_that_fail(RECOMPUTES.sub("", path.read_text(encoding="utf-8"))) for path in shown
    )


def test_nothing_that_is_installed_beside_vllm_moves_it() -> None:
    """``[engine]`` brings vLLM and torch: no page or image tells to add it where they are."""
    for command in COMMANDS:
        if command.words[:2] == ["pip", "install"] and "nixl==" in command.text:
            assert command.words[-2:] == ["-c", "installed.txt"], str(command)
    assert "[engine]" not in (ROOT / "docker/Dockerfile.gpu").read_text(encoding="utf-8")


def test_a_transfer_configuration_with_a_fault_is_refused() -> None:
    """Negative control."""
    wrong = Command("x", SERVED[0].text.replace("side_channel_host", "side_chanel_host"))
    with pytest.raises(ConfigError, match="did you mean 'side_channel_host'"):
        _settings(transfer_config(wrong)["kv_connector_extra_config"])


def _parsed(words: list[str]) -> argparse.Namespace:
    return build_parser(configured=words[0]).parse_args(words)


def transfer_config(command: Command) -> dict[str, Any]:
    """The JSON of ``--kv-transfer-config``."""
    words = command.words
    return dict(json.loads(words[words.index("--kv-transfer-config") + 1]))


def _settings(extra: dict[str, Any], environ: dict[str, str] | None = None) -> Settings:
    return read_settings(extra, "localhost", 5600, 0, environ or {})
