"""Measured tables of sessions, from a small result to the Markdown, by hand."""

from __future__ import annotations

from tests.throughput.measured.rendered.made import lines, made


def test_agents() -> None:
    kept = {
        "way": "keep", "turns": 24, "hit": 0.9832, "first_ms": 168.2, "first_p90_ms": 380.0,
        "of_without": 0.1949, "of_no_pause": 1.16, "flood_per_s": 2.6, "of_alone": 0.942,
        "broken": 0, "alone": 0, "wrong": 0,
    }  # fmt: skip
    nothing = dict.fromkeys(
        ("hit", "first_ms", "first_p90_ms", "of_without", "of_no_pause", "flood_per_s", "of_alone")
    )
    alone = {**kept, **nothing, "way": "alone", "turns": 0, "flood_per_s": 2.76, "of_alone": 1.0}
    assert made("agents", agents={"rows": [kept, alone]}) == lines(
        """
        | | later turns | tokens hit | first token, median, p90 | of without | of no pause \
| flood, requests/s | of the flood alone | promises broken | wrong |
        | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
        | keep | 24 | 98.3 % | 168, 380 ms | 0.19 | 1.16 | 2.60 | 0.94 | 0 | 0 |
        | alone | 0 | | | | | 2.76 | 1.00 | 0 | 0 |
        """
    )


def test_agents_simulated() -> None:
    kept = {
        "way": "keep", "turns": 760, "hit": 0.9891, "least_hit": 0.98, "first_ms": 150.4,
        "first_p90_ms": 201.0, "of_without": 0.253, "of_no_pause": 1.04, "flood_per_s": 121.04,
        "flood_of_alone": 0.967, "flood_of_hits_anyway": 0.999, "flood_worst_s": 0.6,
        "flood_caches": 2.13, "broken": 3, "told": 2, "moved": 1, "preempted": 0,
    }  # fmt: skip
    hot = {**kept, "way": "no pause", "of_no_pause": 1.0, "broken": 0, "moved": 0}
    hot |= dict.fromkeys(("flood_per_s", "flood_of_alone", "flood_of_hits_anyway", "flood_caches"))
    assert made("agents_simulated", agents={"rows": [kept, hot]}) == lines(
        """
        | | tokens hit | first token, median, p90 | of without | of no pause \
| flood, requests/s | of the flood alone | of hits anyway | flood, caches a pause \
| promises broken | turns elsewhere |
        | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
        | keep | 98.9 % | 150, 201 ms | 0.25 | 1.04 | 121.0 | 0.97 | 1.00 | 2.1 | 3 | 1 |
        | no pause | 98.9 % | 150, 201 ms | 0.25 | 1.00 | | | | | 0 | 0 |
        """
    )
