"""Lenders are compared again when our own weights have changed."""

from __future__ import annotations

from pdconn.protocol.compat import WEIGHTS
from pdconn.puller.commands import CompareAnew
from tests.fakes.pair import TRAITS, Pair
from tests.puller.warmup.warm_pair import WarmPair, until_warm
from tests.threads.inside import num_peers

OLD, NEW = TRAITS | {WEIGHTS: "commit:a files:old"}, TRAITS | {WEIGHTS: "commit:b files:new"}


def outcome(pair: Pair, name: str) -> str | None:
    pair.pull(name, pair.lend(f"of-{name}"))
    return pair.outcome_of(name)


def test_a_lender_that_was_ready_is_refused_once_our_weights_are_others() -> None:
    """It is connected, and was compared with what we were."""
    with Pair(traits=OLD) as pair:
        pair.puller.post_command(CompareAnew(OLD))
        assert outcome(pair, "a") is None
        pair.puller.post_command(CompareAnew(NEW))
        for name in ("b", "c"):
            refused = outcome(pair, name)
            assert refused is not None
            assert "weights: theirs commit:a files:old, ours commit:b files:new" in refused
        pair.puller.post_command(CompareAnew(OLD))
        assert outcome(pair, "d") is None


def test_the_lenders_of_before_are_left_where_no_pull_uses_them() -> None:
    with Pair() as pair:
        assert outcome(pair, "a") is None
        assert num_peers(pair.puller) == 1
        pair.puller.post_command(CompareAnew(TRAITS))
        pair.wait(lambda: num_peers(pair.puller) == 0)


def test_a_lender_is_warmed_anew_as_what_we_are_by_then() -> None:
    with WarmPair(warms=True) as pair:
        until_warm(pair)
        pair.puller.post_command(CompareAnew(TRAITS))
        pair.wait(lambda: pair.lender.counts["greeted"] == 2)
        until_warm(pair)


def test_a_pull_with_no_lender_known_is_compared_with_what_we_are_by_then() -> None:
    with Pair(traits=OLD) as pair:
        pair.puller.post_command(CompareAnew(NEW))
        assert "weights" in str(outcome(pair, "a"))
