"""A diagnosis: the checks that ran, then one line and a remedy per finding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from pdconn.tools.doctor.findings import Checked, Finding, Severity
from pdconn.tools.output.columns import Column, document

_WIDTH = 8

_CHECK: tuple[Column[Checked], ...] = (
    Column(None, "name", lambda check: check.name),
    Column(None, "outcome", lambda check: check.outcome),
    Column(None, "seen", lambda check: list(check.seen)),
    Column(None, "skipped", lambda check: check.skipped),
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks, in the order in which they ran."""

    checks: Sequence[Checked]

    @property
    def findings(self) -> list[Finding]:
        """The findings of all checks, worst first."""
        order = list(Severity)
        found = [finding for check in self.checks for finding in check.findings]
        return sorted(found, key=lambda finding: order.index(finding.severity))

    @property
    def is_healthy(self) -> bool:
        """Whether there is no fault."""
        return all(finding.severity is not Severity.FAULT for finding in self.findings)

    def text(self, width: int | None = None) -> str:
        """Checks in order, findings worst first, and a summary; ignores ``width``."""
        longest = max((len(check.name) for check in self.checks), default=0)
        lines = [line for check in self.checks for line in _check_lines(check, longest)]
        for finding in self.findings:
            lines += [
                "",
                f"{finding.severity:<{_WIDTH}} {finding.id}: {finding.subject}: {finding.message}",
                f"{'remedy':<{_WIDTH}} {finding.remedy}",
            ]
        return "\n".join([*lines, "", self._summary()])

    def document(self) -> dict[str, object]:
        """The verdict, all findings, and the facts of each check."""
        return {
            "healthy": self.is_healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "checks": [document(_CHECK, check) for check in self.checks],
        }

    def _summary(self) -> str:
        skipped = sum(check.skipped is not None for check in self.checks)
        counts = [
            _counted(sum(finding.severity is severity for finding in self.findings), severity)
            for severity in Severity
        ]
        verdict = "healthy" if self.is_healthy else "not healthy"
        ran = len(self.checks) - skipped
        return f"{verdict}: {ran} checks, {skipped} skipped; {', '.join(counts)}"


def _check_lines(check: Checked, longest: int) -> Iterator[str]:
    lead = f"{check.outcome:<{_WIDTH}} {check.name:<{longest}}  "
    for line in (check.seen if check.skipped is None else (check.skipped,)) or ("",):
        yield f"{lead}{line}".rstrip()
        lead = " " * len(lead)


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
