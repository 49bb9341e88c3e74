"""What shells complete is what the parsers take."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pdconn.tools.cli.completion_command import all_commands, bash_script, fish_script
from pdconn.tools.cli.main import COMMANDS, main

BASH = bash_script(list(all_commands()))


def completed(*words: str) -> set[str]:
    """What bash offers for the last word."""
    listed = " ".join(f"'{word}'" for word in words)
    code = f"{BASH}\nCOMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _pdconn\n"
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-u", "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pdconn", "d"], {"demo", "doctor", "diff"}),
        (["pdconn", "bench", ""], {"transfer", "serve", "-h", "--help"}),
        (["pdconn", "bench", "transfer", "--pl"], {"--plot"}),
        (["pdconn", "store", "ver"], {"verify"}),
        (["pdconn", "store", "ls", "/kv", "--na"], {"--namespace"}),
        (["pdconn", "proxy", "--policy", "r"], {"round-robin", "random"}),
        (["pdconn", "plan", "--model", "q"], set()),  # a value that is left to the shell
        (["pdconn", "doctor", "--json", "--gol"], {"--golden"}),
        (["pdconn", "completion", "z"], {"zsh"}),
        (["pdconn", "score", "snap"], set()),  # a file, which bash completes itself
    ],
)
def test_bash_completes(words: list[str], expected: set[str]) -> None:
    assert completed(*words) == expected


def test_every_option_of_every_command_is_in_both_scripts() -> None:
    found = list(all_commands())
    assert {one.words[1] for one in found if len(one.words) == 2} == {c.name for c in COMMANDS}
    fish = fish_script(found)
    for one in found:
        for option in one.options:
            for name in option.names:
                assert name in BASH
                assert (f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}") in fish


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_takes_the_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, check=False, timeout=20)
    assert (done.returncode, done.stderr) == (0, b"")
