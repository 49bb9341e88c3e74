"""The matrix of models: each cell that says something was shown names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "compatibility.md"
_LINK = re.compile(r"`(tests/[\w/.-]+)(?:::(\w+))?`")
_SHOWN = ("run", "oracle", "refused")


def problems(page: str, root: Path = ROOT) -> list[str]:
    """What is wrong with the table of models."""
    table = page.split("\n## Models\n")[1].split("\n## ", maxsplit=1)[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    found = [] if rows else ["no rows"]
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if len(cells) != 4:
            found.append(f"{len(cells)} cells: {row}")
            continue
        model, _, state, tests = cells
        links = _LINK.findall(tests)
        if state.startswith(_SHOWN) and not links and "by vLLM" not in state:
            found.append(f"{model}: {state.split(' ')[0]}, by no test")
        if not state.startswith((*_SHOWN, "read")):
            found.append(f"{model}: no state that is defined above: {state}")
        found += [f"{model}: {path}::{name}" for path, name in links if not _is(root, path, name)]
    return found


def _is(root: Path, path: str, name: str) -> bool:
    """Whether the file is there, and has a test of this name if one is given."""
    file = root / path
    if not name:
        return file.exists()
    if not file.is_file():
        return False
    defined = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    return any(isinstance(one, ast.FunctionDef) and one.name == name for one in defined)


def test_every_cell_of_the_matrix_names_its_test() -> None:
    assert problems(PAGE.read_text(encoding="utf-8")) == []


def test_a_cell_without_a_test_is_noticed() -> None:
    """Negative control: rows that claim more than there is."""
    page = "\n## Models\n\n| m | g | s | t |\n|---|---|---|---|\n{}\n\n## More\n"
    here = "tests/project/docs/test_compatibility.py"
    assert problems(page.format(f"| A | | run | `{here}::{problems.__name__}` |")) == []
    assert problems(page.format("| A | | read | |")) == []
    assert problems(page.format("")) == ["no rows"]
    for row in (
        "| A | | run | |",
        "| A | | run | `tests/project/docs/test_nothing.py` |",
        f"| A | | run | `{here}::test_nothing` |",
        "| A | | works | |",
        "| A | run | |",
    ):
        assert len(problems(page.format(row))) == 1, row


# The list of hybrid models above the table


def listed(page: str, mark: str) -> set[str]:
    """The models after ``**mark**:``, up to the sentence's end."""
    section = page.partition("\n## Models\n")[2].partition("\n| models |")[0]
    text = " ".join(section.split()).partition(f"**{mark}**: ")[2].partition(". ")[0]
    return {re.sub(r"[^\w .-]", "", name).strip() for name in text.split(",")}


def hybrids(page: str, state: str) -> set[str]:
    """The models of the rows with several kinds of layers, and this state."""
    found = set()
    table = page.split("\n## Models\n")[1].split("\n## ", maxsplit=1)[0]
    for row in [line for line in table.splitlines() if line.startswith("|")][2:]:
        models, groups, known, _ = (cell.strip() for cell in row.strip("|").split("|"))
        several = re.search(r"\+|window|state|indexer", groups)
        if several and known.startswith(state):
            plain = re.sub(r" \([^)]*\)", "", models).replace(" and ", ", ")
            last = ""
            for name in plain.split(", "):  # "Gemma 3 and 4": a number goes with the name before
                last = f"{last.partition(' ')[0]} {name}" if name.isdecimal() else name
                found.add(last)
    return found


@pytest.mark.parametrize(("mark", "state"), [("ran", "run"), ("By the oracle alone", "oracle")])
def test_the_list_of_hybrids_is_the_tables(mark: str, state: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert listed(page, mark) == hybrids(page, state) != set()


def test_a_hybrid_that_is_listed_and_did_not_run_is_noticed() -> None:
    """Negative control."""
    page = (
        "\n## Models\n\nThese **ran**: A, B. **By the oracle alone**: C.\n\n"
        "| models | g | s | t |\n"
        "|---|---|---|---|\n| A, C | full + state | run | |\n| D | full | run | |\n"
        "| B | full + window | oracle | |\n"
    )
    assert listed(page, "ran") == {"A", "B"}
    assert hybrids(page, "run") == {"A", "C"}
    assert hybrids(page, "oracle") == {"B"}
