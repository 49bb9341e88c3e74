"""Results of checks: findings with a remedy, and observed facts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from transport.errors import FieldError


class Severity(StrEnum):
    """The severity of a finding; only faults make a report unhealthy."""

    FAULT = "fault"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem with a remedy.

    Attributes:
        id: stable, ``subject.problem``, for scripts.
        severity: fault: something does not work; warning: slow, or may fail later; note: possibly
            intended.
        subject: the file, setting, engine or pair concerned.
        message: one sentence with the expected and the seen value.
        remedy: one sentence with the action.
    """

    id: str
    severity: Severity
    subject: str
    message: str
    remedy: str

    def __post_init__(self) -> None:
        for text in (self.id, self.subject, self.message, self.remedy):
            if not text or "\n" in text:
                raise ValueError(f"a finding is made of single lines, got {text!r}")


def one_line(text: object, limit: int = 300) -> str:
    """``text`` from another program as one line of printable characters."""
    words = "".join(c if c.isprintable() else " " for c in str(text)).split()
    line = " ".join(words)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def fault(name: str, subject: str, message: object, remedy: str) -> Finding:
    """A finding about something that does not work."""
    return Finding(name, Severity.FAULT, one_line(subject), one_line(message), remedy)


def warning(name: str, subject: str, message: object, remedy: str) -> Finding:
    """A finding about something slow or fragile."""
    return Finding(name, Severity.WARNING, one_line(subject), one_line(message), remedy)


def note(name: str, subject: str, message: object, remedy: str) -> Finding:
    """A finding about something that may be intended."""
    return Finding(name, Severity.NOTE, one_line(subject), one_line(message), remedy)


def of_error(name: str, error: FieldError, remedy: str) -> Finding:
    """A fault for a value that one of our own checks refuses."""
    tail = f"; {error.hint}" if error.hint else ""
    shown = type(error).show(error.seen)
    return fault(name, error.field, f"expected {error.expected}, got {shown}{tail}", remedy)


@dataclass(frozen=True, slots=True)
class Checked:
    """One check, or the reason why it was skipped.

    Attributes:
        name: name of the check.
        seen: observed facts, one line each.
        findings: empty if all is well.
        skipped: the reason why it did not run; None if it did.
    """

    name: str
    seen: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    skipped: str | None = None

    @property
    def outcome(self) -> str:
        """``ok``, ``skipped``, or the worst severity of its findings."""
        if self.skipped is not None:
            return "skipped"
        found = {finding.severity for finding in self.findings}
        return next((each.value for each in Severity if each in found), "ok")


def checked(name: str, findings: Iterable[Finding], *seen: str) -> Checked:
    """A check that ran."""
    return Checked(name, tuple(map(one_line, seen)), tuple(findings))
