"""A diagnosis as text: what was checked, then a line and a remedy for each finding."""

from __future__ import annotations

from pdconn.tools.doctor.findings import Diagnosis, Severity

_WIDTH = 8


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Checks in their order, findings worst first, and a summary."""
    lines = []
    longest = max((len(check.name) for check in diagnosis.checks), default=0)
    for check in diagnosis.checks:
        head = f"{check.outcome:<{_WIDTH}} {check.name:<{longest}}  "
        seen = check.seen if check.skipped is None else (check.skipped,)
        for number, line in enumerate(seen or ("",)):
            lead = head if number == 0 else " " * len(head)
            lines.append(f"{lead}{line}".rstrip())
    for finding in diagnosis.findings:
        lines += [
            "",
            f"{finding.severity:<{_WIDTH}} {finding.id}: {finding.subject}: {finding.message}",
            f"{'remedy':<{_WIDTH}} {finding.remedy}",
        ]
    return "\n".join([*lines, "", _summary(diagnosis)])


def _summary(diagnosis: Diagnosis) -> str:
    ran = [check for check in diagnosis.checks if check.skipped is None]
    counts = [
        _counted(sum(finding.severity is severity for finding in diagnosis.findings), severity)
        for severity in Severity
    ]
    verdict = "healthy" if diagnosis.is_healthy else "not healthy"
    skipped = len(diagnosis.checks) - len(ran)
    return f"{verdict}: {len(ran)} checks, {skipped} skipped; {', '.join(counts)}"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
