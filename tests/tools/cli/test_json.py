"""``--json`` is one thing in every command: JSON alone on standard output, or a file beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdconn.tools.cli.completion_command import all_commands
from pdconn.tools.cli.main import COMMANDS, main

EXAMPLE = str(Path(__file__).parents[3] / "examples/snapshot.json")
WORDS = {
    "plan": ["plan", "--model", "qwen3-8b"],
    "plan --list": ["plan", "--list"],
    "doctor": ["doctor", "--no-local", "--decode-channel", "127.0.0.1:1"],
    "score": ["score", EXAMPLE],
}
WITHOUT = {"proxy", "picker", "bench", "store", "completion", "pdconn"}
"""proxy prints events as JSON lines; the others have none, or have it one level below."""


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_json_is_printed_alone_or_written_beside_the_text(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*words, "--json"])
    document = json.loads(capsys.readouterr().out)
    file = tmp_path / "out.json"
    assert main([words[0], f"--json={file}", *words[1:]]) == code
    text = capsys.readouterr().out
    assert json.loads(file.read_text(encoding="utf-8")).keys() == document.keys()
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_a_word_behind_it_is_not_taken_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(EXAMPLE).read_bytes()
    assert main(["score", "--json", EXAMPLE]) == 0
    json.loads(capsys.readouterr().out)
    assert Path(EXAMPLE).read_bytes() == before


def test_a_file_that_cannot_be_written_is_named_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in WORDS.values():
        assert main([*words, "--json=/nowhere/out.json"]) == 2
        assert "--json: expected a file in a folder that exists" in capsys.readouterr().err


def test_every_command_with_a_result_has_it() -> None:
    """Of equal meaning, as its help says."""
    commands = [one for one in all_commands() if one.words[-1] not in WITHOUT]
    assert len(commands) > len(COMMANDS) - len(WITHOUT)
    for one in commands:
        (option,) = [option for option in one.options if "--json" in option.names]
        assert option.help == "print the result as JSON", one.words
        assert not option.takes_value
