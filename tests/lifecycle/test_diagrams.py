"""The diagrams at the head of the machines show every state and event of their tables."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from pdconn.lifecycle import lease, load, peer, promises, pull


@pytest.mark.parametrize("module", [lease, load, peer, pull, promises], ids=lambda m: m.__name__)
def test_a_diagram_names_what_its_table_has(module: ModuleType) -> None:
    drawn = _diagram(module)
    words = set(re.findall(r"[A-Za-z]+", drawn))
    table = module.TRANSITIONS
    states = {state.name for pair in table.items() for state in (pair[0][0], pair[1])}
    events = {event for _, event in table}
    assert states <= words, f"states that are not drawn: {states - words}"
    assert states == {word for word in words if word.isupper()}, "states that are no more"
    assert _between(words) <= events, f"events that are no more: {_between(words) - events}"
    # An event that keeps its state need not be drawn.
    moving = {event for (state, event), after in table.items() if after is not state}
    assert moving <= words, f"events that are not drawn: {moving - words}"


def test_an_arrow_to_another_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setitem(peer.TRANSITIONS, (peer.PeerState.CLOSED, "revived"), peer.PeerState.READY)
    with pytest.raises(AssertionError, match="revived"):
        test_a_diagram_names_what_its_table_has(peer)


def _diagram(module: ModuleType) -> str:
    indented = re.search(r"::\n\n((?:    .*\n|\n)+)", module.__doc__ or "")
    assert indented is not None, "no diagram"
    return indented.group(1)


def _between(words: set[str]) -> set[str]:
    return {word for word in words if word.islower()}
