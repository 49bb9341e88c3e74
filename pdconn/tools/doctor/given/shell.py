"""Parses scripts as a POSIX shell or bash does, as far as scripts that start engines need.

Nothing is executed.  Quotes, comments, line continuations, variables with their defaults, arrays,
``export``, here-documents and ``$(cat FILE)`` are understood; all branches of control flow count,
and the first value of a ``for``.  Substitutions that need execution (``$(hostname -i)``) stay
unexpanded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from pdconn.tools.doctor.bad_question import BadQuestion

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_BRACED = re.compile(r"(\w+)(?:\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_CAT = re.compile(r"\s*(?:cat|<)\s*(\S+)\s*")
_KEYWORDS = {"if", "then", "elif", "else", "do", "while", "until", "{", "!", "time", "eval"}
_EXPORTING = {"export", "declare", "typeset", "readonly", "local"}
_OPERATOR = re.compile(r"\d*(?:&>>|&>|>&|<&|>>|<<<|<<-?|>\||>|<)|&&|\|\||;;|[;&|()\n]")
_TO_FILE = (">", ">>", ">|")

ReadText = Callable[[str], str | None]
"""The text of a file that a script names; None if there is none."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command, with its environment beside the shell's own."""

    words: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(slots=True)
class _Scope:
    """The variables of the script so far, and the files that it has written."""

    inherited: Mapping[str, str]
    read: ReadText
    values: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    files: dict[str, str] = field(default_factory=dict)
    exports_all: bool = False

    def value(self, name: str) -> str | None:
        if name in self.arrays:
            return " ".join(self.arrays[name])
        return self.values.get(name, self.inherited.get(name))

    def exported_variables(self) -> dict[str, str]:
        """The environment of commands: exported variables, and those inherited."""
        passed = self.exported | set(self.inherited)
        return {k: v for k, v in self.values.items() if self.exports_all or k in passed}

    def text(self, path: str) -> str | None:
        return self.files[path] if path in self.files else self.read(path)


def read_script(
    text: str, inherited: Mapping[str, str], read: ReadText = lambda path: None
) -> tuple[list[ShellCommand], Mapping[str, str]]:
    """All simple commands, and the files that here-documents of the script write.

    Raises:
        BadQuestion: a quote or a parenthesis is not closed.
    """
    scope = _Scope(inherited, read)
    return list(_Reader(text.replace("\r\n", "\n"), scope).commands()), scope.files


def expanded(text: str, variables: Mapping[str, str], read: ReadText = lambda path: None) -> str:
    """Expand ``$NAME`` and ``${NAME:-default}`` in text without quotes, as in Compose."""
    word = _Word(_Scope(variables, read))
    at = 0
    while at < len(text):
        at = (
            _dollar(text, at, word, quoted=True)
            if text[at] == "$"
            else word.append_letter(text, at)
        )
    return "".join(word.fields)


class _Word:
    """A word under construction: one field, or several if an unquoted variable has spaces."""

    def __init__(self, scope: _Scope) -> None:
        self.scope = scope
        self.fields: list[str] = []

    def append_text(self, text: str) -> None:
        if self.fields:
            self.fields[-1] += text
        else:
            self.fields = [text]

    def append_letter(self, text: str, at: int) -> int:
        self.append_text(text[at])
        return at + 1

    def append_value(self, value: str, *, quoted: bool) -> None:
        """Append a variable's value, which is split unless quoted."""
        pieces = [value] if quoted else value.split()
        if not pieces:
            return
        if not quoted and value[0].isspace() and self.fields:
            self.fields.append("")
        self.append_text(pieces[0])
        self.fields += pieces[1:]

    def append_fields(self, values: list[str]) -> None:
        """Append ``"${NAME[@]}"``: one field per value."""
        for number, value in enumerate(values):
            if number:
                self.fields.append(value)
            else:
                self.append_text(value)


class _Reader:
    def __init__(self, text: str, scope: _Scope) -> None:
        self._text, self._scope = text, scope
        self._at = 0
        self._bodies: list[tuple[str, bool, list[str]]] = []

    def commands(self) -> Iterator[ShellCommand]:
        words: list[_Word] = []
        body: list[str] = []
        target = ""
        while True:
            self._skip()
            found = _OPERATOR.match(self._text, self._at)
            operator = found[0] if found is not None else ""
            if self._at < len(self._text) and not operator:
                words.append(self._word())
                continue
            self._at += len(operator)
            kind = operator.lstrip("0123456789")
            if kind in ("<<", "<<-"):
                self._skip()
                end = self._word()
                self._bodies.append(("".join(end.fields), kind == "<<-", body))
            elif "<" in kind or ">" in kind:
                self._skip()
                path = "".join(self._word().fields)
                target = path if kind in _TO_FILE and operator == kind else target
            else:
                if operator == "\n":
                    self._read_bodies()
                yield from self._simple(words)
                if target and body:
                    self._scope.files[target] = body[0]
                words, body, target = [], [], ""
                if not operator:
                    return

    def _skip(self) -> None:
        """Skip blanks, continued lines and comments."""
        while self._at < len(self._text):
            if self._text[self._at] in " \t":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._text[self._at] == "#":
                self._at = (self._text.find("\n", self._at) + 1 or len(self._text) + 1) - 1
            else:
                return

    def _read_bodies(self) -> None:
        """Read the here-documents that this line has begun."""
        for end, strips_tabs, body in self._bodies:
            lines = []
            while self._at < len(self._text):
                line, newline, _ = self._text[self._at :].partition("\n")
                self._at += len(line) + len(newline)
                line = line.lstrip("\t") if strips_tabs else line
                if line == end:
                    break
                lines.append(line)
            text = "".join(f"{line}\n" for line in lines)
            body.append(expanded(text, {**self._scope.inherited, **self._scope.values}))
        self._bodies = []

    def _word(self) -> _Word:
        text, word = self._text, _Word(self._scope)
        while self._at < len(text):
            char = text[self._at]
            if char in " \t" or (_OPERATOR.match(text, self._at) and not char.isdigit()):
                break
            if char == "\\":
                word.append_text(text[self._at + 1 : self._at + 2].replace("\n", ""))
                self._at += 2
            elif char == "'" or text.startswith("$'", self._at):
                word.append_text(self._until("'", self._at + text[self._at :].index("'") + 1))
            elif char == '"':
                self._double(word)
            elif char in "$`":
                self._at = _dollar(text, self._at, word, quoted=False)
            else:
                self._at = word.append_letter(text, self._at)
            if text[self._at : self._at + 1] == "(" and self._is_array(word):
                break
        return word

    def _is_array(self, word: _Word) -> bool:
        """Parse ``NAME=(a b)``, whose words may span several lines."""
        found = _ASSIGNED.fullmatch("".join(word.fields))
        if found is None:
            return False
        self._at += 1
        held = self._scope.arrays.setdefault(found[1], [])
        if not found[2]:
            held.clear()
        while self._text[self._at : self._at + 1] != ")":
            self._skip()
            if self._text[self._at : self._at + 1] == "\n":
                self._at += 1
            elif self._at >= len(self._text):
                raise BadQuestion("--config", "a command line in balanced quotes", "an open (")
            elif self._text[self._at] != ")":
                held += self._word().fields
        self._at += 1
        word.fields = []
        return True

    def _until(self, quote: str, start: int) -> str:
        end = self._text.find(quote, start)
        if end < 0:
            raise BadQuestion("--config", "a command line in balanced quotes", f"an open {quote}")
        self._at = end + 1
        return self._text[start:end]

    def _double(self, word: _Word) -> None:
        text = self._text
        self._at += 1
        before = bool(word.fields)
        while text[self._at : self._at + 1] != '"':
            if self._at >= len(text):
                self._until('"', self._at)
            if text[self._at] == "\\" and text[self._at + 1 : self._at + 2] in '$`"\\\n':
                word.append_text(text[self._at + 1].replace("\n", ""))
                self._at += 2
            elif text[self._at] in "$`":
                self._at = _dollar(text, self._at, word, quoted=True)
            else:
                self._at = word.append_letter(text, self._at)
        self._at += 1
        if not before and not word.fields and not text[: self._at].endswith('[@]}"'):
            word.append_text("")

    def _simple(self, words: list[_Word]) -> Iterator[ShellCommand]:
        """A command, or assignments, which affect what follows."""
        fields = [one for word in words for one in word.fields]
        while fields and fields[0] in _KEYWORDS:
            del fields[0]
        own: dict[str, str] = {}
        while fields and (found := _ASSIGNED.match(fields[0])):
            value = fields.pop(0)[found.end() :]
            own[found[1]] = (self._scope.value(found[1]) or "") + value if found[2] else value
        if not fields:
            self._scope.values |= own
            return
        if fields[0] in _EXPORTING:
            for word in fields[1:]:
                name, equals, value = word.partition("=")
                if equals:
                    self._scope.values[name] = value
                if fields[0] == "export" or "-x" in fields:
                    self._scope.exported.add(name)
        elif fields[0] == "for" and fields[2:3] == ["in"]:
            self._scope.values[fields[1]] = fields[3] if len(fields) > 3 else ""
        elif fields[0] == "set" and ("-a" in fields or "allexport" in fields):
            self._scope.exports_all = True
        else:
            yield ShellCommand(tuple(fields), {**self._scope.exported_variables(), **own})


def _dollar(text: str, at: int, word: _Word, *, quoted: bool) -> int:
    """Expand the expression at ``at``; returns its end."""
    if text[at] == "`" or text.startswith("$(", at):
        return _substitute(text, at, word, quoted=quoted)
    if text.startswith("$$", at):
        word.append_text("$")
        return at + 2
    if text.startswith("${", at):
        return _braced(text, at, word, quoted=quoted)
    named = _NAME.match(text, at + 1)
    if named is None:
        return word.append_letter(text, at)
    word.append_value(word.scope.value(named[0]) or "", quoted=quoted)
    return named.end()


def _braced(text: str, at: int, word: _Word, *, quoted: bool) -> int:
    end = _closing(text, at + 2, "{", "}")
    found = _BRACED.fullmatch(text[at + 2 : end - 1])
    if found is None:
        word.append_text(text[at:end])
    elif "[" in text[at:end] and found[1] in word.scope.arrays:
        values = word.scope.arrays[found[1]]
        word.append_fields(values) if quoted else word.append_value(" ".join(values), quoted=False)
    else:
        word.append_value(_chosen(found, word.scope), quoted=quoted)
    return end


def _chosen(found: re.Match[str], scope: _Scope) -> str:
    """The value of a variable, with ``:-``, ``:=`` and ``:+`` applied."""
    held, how, other = scope.value(found[1]), found[2] or "", found[3] or ""
    is_there = bool(held) if how.startswith(":") else held is not None
    takes_other = how.endswith("+") == is_there
    if not how or not takes_other:
        return "" if how.endswith("+") else held or ""
    inner = other[1:-1] if other[:1] == other[-1:] and other[:1] in ("'", '"') else other
    return expanded(inner, {**scope.inherited, **scope.values}, scope.text)


def _substitute(text: str, at: int, word: _Word, *, quoted: bool) -> int:
    """Expand ``$(cat FILE)``; other commands stay unexpanded, since nothing is executed."""
    if text[at] == "`":
        end = text.find("`", at + 1) + 1 or len(text)
        inner = text[at + 1 : end - 1]
    else:
        end = _closing(text, at + 2, "(", ")")
        inner = text[at + 2 : end - 1]
    found = _CAT.fullmatch(inner)
    path = "" if found is None else expanded(found[1], word.scope.values).strip("\"'")
    content = word.scope.text(path) if path else None
    if content is None:
        word.append_text(text[at:end])
    else:
        word.append_value(content.rstrip("\n"), quoted=quoted)
    return end


def _closing(text: str, at: int, opening: str, closing: str) -> int:
    """The position after the parenthesis that closes the one before ``at``."""
    depth = 1
    while depth and at < len(text):
        depth += (text[at] == opening) - (text[at] == closing)
        at += 1
    if depth:
        raise BadQuestion("--config", "a command line in balanced quotes", f"an open {opening}")
    return at
