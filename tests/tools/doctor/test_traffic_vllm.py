"""Every counter of failed pulls that engines export is a cause that router and doctor can name."""

from __future__ import annotations

import re
import warnings

import pytest

from pdconn.router.fleet.pull_counts import COUNTERS, FAILED, PULL_CAUSES, PULLS, READS

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from pdconn.vllm.stats import _COUNTERS, _HISTOGRAMS

GOOD = {
    "pdconn:pulls",
    "pdconn:pulls_confirmed",
    "pdconn:pulls_followed",
    "pdconn:pulls_verified",
} | {
    "pdconn:tickets_gave_way"  # of those that are gone
}


def test_every_counter_of_failed_pulls_is_a_cause_and_the_other_way_round() -> None:
    exported = {name for name, _ in _COUNTERS.values()}
    failing = {name for name in exported if re.match(r"pdconn:(pulls|tickets)(_|$)", name)} - GOOD
    assert {one.metric for one in PULL_CAUSES} == {f"{name}_total" for name in failing}
    assert len(failing) > 10
    assert failing - {"pdconn:pulls_unverified"} != failing, "control: the one that was missing"


def test_what_the_router_reads_is_what_engines_export() -> None:
    exported = {f"{name}_total" for name, _ in _COUNTERS.values()}
    exported |= {f"{name}_count" for name, _, _ in _HISTOGRAMS.values()}
    assert {PULLS, FAILED, READS, *COUNTERS} <= exported
