"""The declaration of a router option: a row of the table in :mod:`pdconn.router.proxy_config`.

The table consists of the fields of its records.  A field declares everything about its option::

    alone_below: int = option(256, "TOKENS", number(what="tokens"), "decode serves ...")

The parser, ``--help``, ``docs/cli.md``, the checks of the settings and the list of files that
SIGHUP reads again are derived from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any

from pdconn.router.router_errors import BadSetting

_ROW = "option"


class Unfit(ValueError):
    """A value that an option does not accept: the expectation, and the offending part."""

    def __init__(self, expected: str, seen: object) -> None:
        super().__init__(expected)
        self.seen = seen


Check = Callable[[Any], None]
"""Raises ``Unfit`` for values that the option does not accept."""


def any_value(value: object) -> None:
    """Take everything."""
    del value


def number(least: float = 0, what: str = "a number") -> Check:
    """A finite number of at least ``least``."""

    def check(value: float) -> None:
        if not (math.isfinite(value) and value >= least):
            raise Unfit(f"{what}, at least {least:g}", value)

    return check


def seconds(least: float = 0.001) -> Check:
    """A duration; a time-out of 0 would end before it began."""
    return number(least, "seconds")


_LIMITS = {"auto": None, "none": math.inf}
_TAKEN_AS_LIMIT = "seconds, at least 0.001, auto or none"


def limit(value: float) -> None:
    """A check of a duration that ``math.inf`` stands for none of."""
    if not value >= 0.001:
        raise Unfit(_TAKEN_AS_LIMIT, value)


def parse_limit(word: str) -> float | None:
    """Seconds, or ``none`` for no limit; None for ``auto``, one that is learned.

    >>> parse_limit("2.5"), parse_limit("none"), parse_limit("auto")
    (2.5, inf, None)
    """
    if word in _LIMITS:
        return _LIMITS[word]
    try:
        return float(word)
    except ValueError as error:
        raise Unfit(_TAKEN_AS_LIMIT, word) from error


def each(check: Check) -> Check:
    """A check of every one of several values."""

    def check_all(values: Collection[object]) -> None:
        for value in values:
            check(value)

    return check_all


@dataclass(frozen=True, slots=True)
class RouterOption:
    """One option.

    Attributes:
        default: of the setting; None where it is off, or derived.
        takes: the name of its value in ``--help``; empty: the option's name, or ``choices``.
        check: checks a value that is not None.
        help: the help text, to which the default is added.
        parse: converts a word of the command line; raises ``Unfit`` for invalid ones.
        unset: the meaning of a default of None, in words.
        flag: the option's spelling; empty: the name of the setting, without its unit of seconds.
        choices: the accepted words; empty for any.
        several: several values in one use ("+"), or one per use ("append").
        collect: combines the values of an option that takes several.
        is_reloaded: whether SIGHUP reads the file that it names again.
        name: the name of the setting; the table sets it.
    """

    default: Any
    takes: str
    check: Check
    help: str
    parse: Callable[[str], Any] = str
    unset: str = ""
    flag: str = ""
    choices: tuple[str, ...] = ()
    several: str = ""
    collect: Callable[[list[Any]], Any] = tuple
    is_reloaded: bool = False
    name: str = ""

    def named(self, name: str) -> RouterOption:
        """The option with the name of its setting."""
        flag = self.flag or f"--{name.removesuffix('_s').replace('_', '-')}"
        return dataclasses.replace(self, name=name, flag=flag)

    def judge(self, value: Any) -> None:
        """Check a value of the setting.

        Raises:
            BadSetting: the value is invalid.
        """
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise BadSetting(self.flag, f"one of {', '.join(self.choices)}", value)
        try:
            self.check(value)
        except Unfit as error:
            raise BadSetting(self.flag, error, error.seen) from error

    @property
    def explained(self) -> str:
        """``help`` with the default."""
        if self.several or isinstance(self.default, bool):
            return self.help
        default = self.default
        shown = f"{default:g}" if isinstance(default, float) else default
        meant = self.unset if default is None else shown
        return self.help if meant == "" else f"{self.help} ({meant})"


def option(
    default: Any, takes: str = "", check: Check = any_value, says: str = "", **more: Any
) -> Any:
    """A field of a settings record; arguments as for ``RouterOption``, ``says`` is its help."""
    row = RouterOption(default, takes, check, says, **more)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata={_ROW: row})
    return dataclasses.field(default=default, metadata={_ROW: row})


def switch(says: str) -> Any:
    """A field that is False unless the option is given."""
    return option(False, says=says)


def options_of(record: type) -> Iterator[RouterOption]:
    """The options among a record's fields, in order."""
    for field in fields(record):
        if _ROW in field.metadata:
            yield field.metadata[_ROW].named(field.name)


class CheckedSettings:
    """A record of settings; each is checked by its row.

    Raises:
        BadSetting: a value is invalid; ``field`` is its command-line option.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for row in options_of(type(self)):
            row.judge(getattr(self, row.name))
        self.check_together()

    def check_together(self) -> None:
        """Check rules that involve several settings."""
