"""The parser of all commands: errors are one line, with the nearest known word."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line and suggest the nearest known word."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2 and one line, without the usage."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse as argparse does, but refuse unknown arguments.

        A subcommand's parser refuses unknown arguments here.  argparse would pass them to the
        outermost parser, which has none of the subcommand's options to compare with.
        """
        found, unknown = super().parse_known_args(self._with_json(args), namespace)
        if unknown:
            word = next((one for one in unknown if one.startswith("-")), unknown[0])
            self.error(f"unknown argument {word}{self._near(word)}")
        return found, unknown

    def _with_json(self, args: Sequence[str] | None) -> Sequence[str] | None:
        """Turn ``--json`` into ``--json=-`` if the next word is one that the command needs."""
        needs = any(one.nargs in (None, "+") for one in self._get_positional_actions())
        if args is None or not needs or "--json" not in self._option_string_actions:
            return args
        return ["--json=-" if word == "--json" else word for word in args]

    def _near(self, word: str) -> str:
        name = word.partition("=")[0]
        return _hint(name, self._option_string_actions)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _hint(str(value), map(str, action.choices or ()))
            raise


def _hint(word: str, known: Iterable[str]) -> str:
    """``; did you mean '--policy'?``, or empty if no known word is near."""
    from transport.errors import did_you_mean  # imports numpy, which --help does without

    hint = did_you_mean(word, known)
    return f"; {hint}" if hint.startswith("did you mean") else ""
