"""To its peers an engine is another boot when what it lends is of other weights than before."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pdconn.protocol.compat import UNPROVEN, WEIGHTS
from pdconn.protocol.messages import RankGeometry

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pdconn.vllm.identity.greeting import Greeting
    from pdconn.vllm.metadata import PdHandshake, joint_traits
from tests.fakes.pair import Cache
from tests.vllm.store.configured import config

TRAITS = {"model": "m", WEIGHTS: "commit:a files:b"}


def handshakes(traits: dict[str, str], address: bytes = b"a") -> dict[tuple[int, int], PdHandshake]:
    geometry = RankGeometry(0, 0, address, Cache("BHLNC", filled=False).references)
    return {(0, 0): PdHandshake(msgspec.msgpack.encode(geometry), traits, TRAITS)}


@pytest.fixture
def greeting() -> Any:
    made = config("m")
    made.kv_transfer_config = SimpleNamespace(engine_id="p")
    greeting = Greeting(made, "boot")
    assert greeting.registered(handshakes(TRAITS))
    return greeting


def test_the_first_boot_says_what_was_loaded(greeting: Any) -> None:
    assert (greeting.welcome.incarnation, greeting.welcome.traits) == ("boot", TRAITS)
    assert not greeting.registered(handshakes(TRAITS))
    assert greeting.take_weights() is None
    assert (greeting.is_proven, greeting.doubt) == (True, "")


def test_other_weights_are_another_boot_and_are_compared_anew(
    greeting: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert not greeting.compare_anew(may_have_lent=False)
    greeting.weights.changed("update_weights")
    assert greeting.compare_anew(may_have_lent=False)
    assert greeting.welcome.incarnation != "boot"
    assert greeting.welcome.traits[WEIGHTS].startswith(UNPROVEN)
    [line] = caplog.messages
    assert "nothing is handed over" in line
    assert not greeting.is_proven
    assert "update_weights" in greeting.doubt
    assert greeting.take_weights() == greeting.weights.of_engine
    assert greeting.take_weights() is None


def test_an_engine_pulls_by_its_weights_while_its_cache_has_kv_of_others(greeting: Any) -> None:
    """What it lends stays unproven, which hid that what it is compared by had changed."""
    greeting.weights.note_computed()
    greeting.weights.changed("update_weights")
    greeting.compare_anew(may_have_lent=True)
    greeting.take_weights()
    said = greeting.welcome
    greeting.weights.named("2")
    greeting.compare_anew(may_have_lent=False)
    assert (greeting.is_proven, greeting.doubt) == (False, "")
    assert greeting.take_weights() == greeting.weights.of_engine
    greeting.weights.was_reset()
    assert greeting.compare_anew(may_have_lent=False)
    assert greeting.is_proven
    assert greeting.welcome.incarnation != said.incarnation


def test_what_was_lent_before_a_change_is_of_a_boot_before(greeting: Any) -> None:
    """Also where nothing new is said: a trainer calls more than once."""
    greeting.weights.changed("update_weights")
    greeting.compare_anew(may_have_lent=False)
    before = greeting.welcome
    greeting.weights.changed("update_weights")
    assert not greeting.compare_anew(may_have_lent=False)
    assert greeting.compare_anew(may_have_lent=True)
    assert greeting.welcome.incarnation != before.incarnation
    assert greeting.welcome.traits == before.traits


def test_an_engine_that_wakes_does_not_take_its_weights_for_those_it_loaded(greeting: Any) -> None:
    greeting.weights.changed("update_weights")
    greeting.compare_anew(may_have_lent=False)
    before = greeting.welcome
    assert greeting.registered(handshakes(TRAITS, b"other"))
    assert greeting.welcome.traits == before.traits
    assert greeting.welcome.incarnation != before.incarnation


def test_where_peers_are_not_compared_other_weights_are_another_boot_as_well() -> None:
    made = config("m")
    made.kv_transfer_config = SimpleNamespace(engine_id="p")
    greeting = Greeting(made, "boot")
    assert greeting.registered(handshakes({}))
    assert greeting.weights is not None
    greeting.weights.changed("update_weights")
    assert greeting.compare_anew(may_have_lent=True)
    assert greeting.welcome.traits == {}
    assert (greeting.is_proven, greeting.doubt) == (True, "")
    assert not greeting.compare_anew(may_have_lent=False)


@pytest.mark.parametrize(
    ("ranks", "joint"),
    [
        (["commit:a files:b"], "commit:a files:b"),
        (["commit:a files:b", "files:b commit:a"], "commit:a files:b"),
        (["commit:a files:b", "files:b"], "files:b"),
        (["files:b", "files:c"], f"{UNPROVEN}ranks of this engine have loaded other weights"),
        (
            ["files:b", f"{UNPROVEN}why"],
            f"{UNPROVEN}ranks of this engine have loaded other weights",
        ),
        ([f"{UNPROVEN}why", "files:b"], f"{UNPROVEN}why"),
    ],
)
def test_an_engine_is_proven_by_what_proves_all_of_its_ranks(ranks: list[str], joint: str) -> None:
    """Each machine of a pipeline has files of its own."""
    assert joint_traits([TRAITS | {WEIGHTS: text} for text in ranks]) == TRAITS | {WEIGHTS: joint}
