"""Two descriptions of vLLM, side by side: what would break, and what only differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.project.next.facts import MISSING, Facts
from tests.project.next.uses import FITTING


@dataclass(frozen=True)
class Outcome:
    """Of one step: a line, what is wrong, and what a person may want to read."""

    step: str
    line: str
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def text(self, seconds: float) -> str:
        """As it is printed, when the step took so long."""
        result = "FAILED" if self.problems else "ok"
        lines = [f"{self.step:<10} {result:<7} {self.line} ({seconds:.0f} s)"]
        lines += [f"    wrong: {problem}" for problem in self.problems]
        lines += [f"    note: {note}" for note in self.notes]
        return "\n".join(lines)


def imports(now: Facts, then: Facts) -> Outcome:
    """Whether every module of ours can be imported with the next vLLM."""
    problems = [f"{name}: {why}" for name, why in then.broken.items()]
    problems += sorted(f"{name}: was imported" for name in {*now.modules} - {*then.modules})
    line = f"{len(then.modules)} modules of ours, with vLLM {then.version}"
    return Outcome("imports", line, tuple(dict.fromkeys(problems)))


def overrides(now: Facts, then: Facts, fitting: Mapping[str, str] = FITTING) -> Outcome:
    """Whether what ours override is as it was, and takes what vLLM passes."""
    problems = [f"{name}: {why}" for name, why in then.misfits.items()]
    changes = _changes(now.overridden, then.overridden)
    problems += [text for name, text in changes.items() if name not in fitting]
    new = sorted({*then.hooks} - {*now.hooks})
    gone = sorted({*now.hooks} - {*then.hooks})
    notes = [f"fits all the same: {name}: {fitting[name]}" for name in changes if name in fitting]
    notes += [f"hooks that it adds: {', '.join(new)}"] if new else []
    notes += [f"hooks that it has no longer: {', '.join(gone)}"] if gone else []
    line = f"{len(then.overridden)} signatures that ours override"
    return Outcome("overrides", line, tuple(problems), tuple(notes))


def names(now: Facts, then: Facts, fitting: Mapping[str, str] = FITTING) -> Outcome:
    """Whether what we import, call, read and replace is as it was."""
    problems = [f"{name}: {MISSING} in {now.version}" for name in _missing(now)]
    changes = _changes(now.names, then.names)
    problems += [text for name, text in changes.items() if name not in fitting]
    notes = [f"fits all the same: {name}: {fitting[name]}" for name in changes if name in fitting]
    changed = [name for name, digest in now.bodies.items() if then.bodies.get(name) != digest]
    notes += [f"replaced by us, and its body differs: {name}" for name in changed]
    notes += [f"differs no longer, and stands in FITTING: {name}" for name in stale(now, then)]
    return Outcome("names", f"{len(then.names)} names that ours use", tuple(problems), tuple(notes))


def stale(now: Facts, then: Facts, fitting: Mapping[str, str] = FITTING) -> list[str]:
    """Entries of ``fitting`` that do not differ any more."""
    changes = {**_changes(now.names, then.names), **_changes(now.overridden, then.overridden)}
    return sorted(fitting.keys() - changes.keys())


def _missing(facts: Facts) -> list[str]:
    return [name for name, found in facts.names.items() if found == MISSING]


def _changes(now: Mapping[str, str], then: Mapping[str, str]) -> dict[str, str]:
    """What both name and describe differently, or what is gone."""
    changes = {}
    for name, before in now.items():
        after = then.get(name, MISSING)
        if before != after:
            changes[name] = f"{name}: was {before}, is {after}"
    return changes
