"""Goodput of roles that follow the load, beside fixed ratios: ``python -m tests.tools.plan.fleet``.

A row for each fleet: the share of each phase's requests within the targets, by following and by the
best ratio of the phase; the same over the whole, by the best single ratio; and changes of roles.
"""

from __future__ import annotations

from tests.tools.plan.fleet.test_followed_load import LARGE, SCENARIOS, Scenario


def table(scenarios: tuple[Scenario, ...]) -> str:
    """The table of some scenarios, the minutes in which a fleet settles left out."""
    lines = [
        "| engines | followed, by phase | best ratio of each | followed, whole | best single "
        "| changes |",
        "|---|---|---|---|---|---|",
    ]
    for scenario in scenarios:
        run = scenario.follow()
        stays = {number: scenario.stay(number) for number in scenario.ratios}
        phases = range(1, len(run.phases))
        offered = sum(run.phases[n].offered for n in phases)
        best = [max(stays, key=lambda r, n=n: stays[r].phases[n].good) for n in phases]
        wholes = {r: sum(one.good for one in stay.phases[1:]) for r, stay in stays.items()}
        single = max(wholes, key=lambda number: wholes[number])
        followed = sum(run.phases[n].good for n in phases)
        cells = (
            str(scenario.engines),
            ", ".join(f"{run.phases[n].good / run.phases[n].offered:.1%}" for n in phases),
            ", ".join(
                f"{stays[r].phases[n].good / run.phases[n].offered:.1%} "
                f"({r}:{scenario.engines - r})"
                for n, r in zip(phases, best, strict=True)
            ),
            f"{followed / offered:.1%}",
            f"{wholes[single] / offered:.1%} ({single}:{scenario.engines - single})",
            str(len([one for one in run.moves if one.began_s > scenario.phases[0].seconds])),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table((*SCENARIOS.values(), LARGE)))
