"""The ``pdconn`` command, as a user runs it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from pdconn import __version__
from pdconn.tools.cli.main import COMMANDS, main

PDCONN = [sys.executable, "-m", "pdconn.tools.cli.main"]


def pdconn(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PDCONN, *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_is_enough_to_begin_and_imports_nothing_heavy():
    code = (
        "import sys; from pdconn.tools.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: print('exit', end.code)\n"
        "heavy = {'torch', 'vllm', 'nixl', 'numpy', 'aiohttp', 'asyncio'}\n"
        "print('heavy', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "exit 0" in done.stdout
    assert "heavy []" in done.stdout
    for command in COMMANDS:
        assert command.name in done.stdout
        assert command.summary in done.stdout
    assert "examples:" in done.stdout
    assert "exit codes:" in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"pdconn {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "COMMAND"),
        (["prxy"], "prxy"),
        (["proxy", "--policy", "best"], "--policy"),
        (["proxy", "--prefill", "http://a:1", "--decode", "http://b:1", "--port", "x"], "--port"),
        (["proxy", "--prefill", "http://a:1", "--decode", "http://b:1", "--what"], "--what"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_says_what_is_wrong(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--prefill: expected at least one URL"),
        (["--prefill", "http://a:1"], "--decode: expected at least one URL"),
        (["--prefill", "localhost:8100", "--decode", "http://b:1"], "--prefill: expected"),
        (["--prefill", "http://a:1", "--decode", "ftp://b:1"], "--decode: expected"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--port", "99999"], "--port"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--wait", "-1"], "--wait"),
        (["--prefill", "http://a:1", "--decode", "http://b:1", "--max-body-mib", "nan"], "--max"),
    ],
)
def test_a_setting_without_sense_ends_with_2_and_one_line(words, message, capsys):
    assert main(["proxy", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_every_command_explains_itself(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit) as end:
            main([command.name, "--help"])
        assert end.value.code == 0
        text = capsys.readouterr().out
        assert "examples:" in text
        assert "exit codes:" in text


def test_a_port_in_use_ends_with_2_and_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"]
        done = pdconn("proxy", *words, "--port", port)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"port {port}" in line
    assert "in use" in line


def test_missing_engines_end_the_wait_with_1():
    words = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"]
    done = pdconn("proxy", *words, "--port", "0", "--wait", "0.1")
    assert done.returncode == 1
    assert "http://127.0.0.1:1: Connection refused" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_signal_ends_the_proxy_with_0(number, waiting):
    words = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--port", "0"]
    wait = ["--wait", "60"] if waiting else []
    process = subprocess.Popen(
        [*PDCONN, "proxy", *words, *wait, "--json"], stdout=subprocess.PIPE, text=True
    )
    with process:
        event = json.loads(process.stdout.readline())
        assert event["event"] == ("waiting" if waiting else "listening")
        time.sleep(0.1 if waiting else 0)
        os.kill(process.pid, number)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 0
    assert waiting or json.loads(rest)["event"] == "draining"
