"""Remembered chains give the hashes that computing them anew would."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdconn.router.prefix.chains import Chains
from pdconn.router.prefix.hashing import (
    ALGORITHMS,
    NOTHING,
    BadPrompt,
    Extras,
    HashScheme,
    MultimodalItem,
    chain,
    external,
)

pytestmark = pytest.mark.usefixtures("in_both")

SCHEME = HashScheme("sha256_cbor", 4)
CAT, DOG = (Extras(items=(MultimodalItem(name, 9, 6),)) for name in ("cat", "dog"))


def anew(tokens: list[int], extras: Extras = NOTHING, scheme: HashScheme = SCHEME) -> list[int]:
    return [external(full) for full in chain(scheme, tokens, extras)]


def work(chains: Chains, tokens: list[int], extras: Extras = NOTHING) -> tuple[int, int]:
    """Blocks reused and computed for a prompt, whose hashes have to be right."""
    before = chains.blocks_reused, chains.blocks_computed
    assert chains.hashes_of(tokens, extras) == anew(tokens, extras)
    return chains.blocks_reused - before[0], chains.blocks_computed - before[1]


# Few tokens and short prompts, so that prefixes are shared at every depth and often.
SHORT = st.lists(st.integers(0, 1), max_size=14)
SEVERAL = st.builds(
    Extras,
    lora=st.sampled_from((None, ("sql", "/a"), ("sql", "/b"))),
    cache_salt=st.sampled_from((None, "x")),
    items=st.lists(
        st.builds(MultimodalItem, st.sampled_from("ab"), st.integers(0, 12), st.integers(0, 5)),
        max_size=2,
    ).map(lambda items: tuple(sorted(items, key=lambda item: item.offset))),
)
REQUESTS = st.lists(
    st.tuples(SHORT, st.one_of(st.just(NOTHING), st.just(NOTHING), SEVERAL)), max_size=25
)


@given(
    algorithm=st.sampled_from(tuple(ALGORITHMS)),
    block_tokens=st.integers(1, 3),
    max_tokens=st.integers(0, 60),
    requests=REQUESTS,
)
@settings(deadline=None, max_examples=300)
def test_hashes_are_those_computed_anew_and_the_bound_holds(
    algorithm: str, block_tokens: int, max_tokens: int, requests: list[tuple[list[int], Extras]]
) -> None:
    scheme = HashScheme(algorithm, block_tokens, "0")
    chains = Chains(scheme, max_tokens=max_tokens)
    num_blocks = 0
    for tokens, extras in requests:
        assert chains.hashes_of(tokens, extras) == anew(tokens, extras, scheme)
        num_blocks += len(tokens) // block_tokens
        assert chains.num_tokens <= max_tokens
    assert chains.blocks_reused + chains.blocks_computed == num_blocks


@given(block_tokens=st.integers(1, 3), requests=REQUESTS)
@settings(deadline=None, max_examples=300)
def test_no_block_is_computed_twice_while_there_is_room(
    block_tokens: int, requests: list[tuple[list[int], Extras]]
) -> None:
    scheme = HashScheme("sha256_cbor", block_tokens)
    chains = Chains(scheme, max_tokens=10**6)
    seen: set[int] = set()
    for tokens, extras in requests:
        chains.hashes_of(tokens, extras)
        seen.update(anew(tokens, extras, scheme))
        assert chains.blocks_computed == len(seen)
        assert chains.num_tokens == len(seen) * block_tokens


def test_a_conversation_is_hashed_from_where_it_grew() -> None:
    chains = Chains(SCHEME, max_tokens=1000)
    prompt = list(range(100))
    assert [work(chains, prompt[:n]) for n in (41, 41, 43, 44, 100, 60)] == [
        (0, 10), (10, 0), (10, 0), (10, 1), (11, 14), (15, 0),
    ]  # fmt: skip


def test_prompts_share_what_they_begin_with_and_no_more() -> None:
    chains = Chains(SCHEME, max_tokens=1000)
    system, first, second = [1] * 40, [2] * 40, [3] * 40
    assert work(chains, system + first) == (0, 20)
    assert work(chains, system + second) == (10, 10)
    assert work(chains, [*system[:-1], 9, *first]) == (9, 11)
    assert work(chains, system + first + second) == (20, 10)
    assert work(chains, second) == (0, 10)


@pytest.mark.parametrize(
    ("other", "reused"),
    [
        (Extras(), 5),
        (Extras(cache_salt="x"), 0),
        (Extras(lora=("sql", "/a")), 0),
        (Extras(items=(MultimodalItem("cat", 9, 1),)), 2),
        (Extras(items=(MultimodalItem("cat", 99, 1),)), 5),
    ],
)
def test_only_blocks_with_the_same_extras_are_shared(other: Extras, reused: int) -> None:
    chains = Chains(SCHEME, max_tokens=1000)
    assert work(chains, [7] * 20) == (0, 5)
    assert work(chains, [7] * 20, other) == (reused, 5 - reused)
    assert work(chains, [7] * 20, other) == (5, 0)
    assert work(chains, [7] * 20) == (5, 0)


def test_images_are_distinguished_from_the_block_that_they_begin_in() -> None:
    chains = Chains(SCHEME, max_tokens=1000)
    assert work(chains, [7] * 40, CAT) == (0, 10)
    assert work(chains, [7] * 40, DOG) == (2, 8)
    more = Extras(items=(*CAT.items, MultimodalItem("dog", 40, 2)))
    assert work(chains, [7] * 48, more) == (10, 2)


def test_images_in_what_a_prompt_grew_by_are_distinguished() -> None:
    chains = Chains(SCHEME, max_tokens=1000)
    assert work(chains, [7] * 8) == (0, 2)
    assert work(chains, [7] * 40, CAT) == (2, 8)
    assert work(chains, [7] * 40, DOG) == (2, 8)
    assert work(chains, [7] * 40) == (2, 8)


def test_a_conversation_is_one_run_however_often_it_grows() -> None:
    chains = Chains(SCHEME, max_tokens=1000)
    for turn in range(1, 50):
        assert work(chains, [7] * 4 * turn) == (turn - 1, 1)
    assert chains.num_runs == 1
    work(chains, [7] * 40 + [8] * 40)
    assert chains.num_runs == 3


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    chains = Chains(SCHEME, max_tokens=120)
    old, used, new = [1] * 40, [2] * 60, [3] * 40
    assert (work(chains, old), work(chains, used)) == ((0, 10), (0, 15))
    assert work(chains, used[:20]) == (5, 0)
    assert work(chains, new) == (0, 10)
    assert chains.num_tokens == 100
    assert work(chains, used) == (15, 0)
    assert work(chains, old) == (0, 10)


def test_what_prompts_share_outlives_each_of_them() -> None:
    chains = Chains(SCHEME, max_tokens=100)
    for question in range(50):
        reused, _ = work(chains, [1] * 40 + [question] * 20)
        assert reused == (10 if question else 0)


def test_what_prompts_share_is_forgotten_after_them() -> None:
    chains = Chains(SCHEME, max_tokens=120)
    system = [1] * 40
    work(chains, system + [2] * 40)
    work(chains, system + [3] * 40)
    assert chains.num_tokens == 120
    assert work(chains, [4] * 80) == (0, 20)
    assert chains.num_tokens == 120
    assert work(chains, system) == (10, 0)


def test_a_prompt_beyond_the_bound_is_hashed_and_drives_nothing_out() -> None:
    chains = Chains(SCHEME, max_tokens=40)
    assert work(chains, [1] * 40) == (0, 10)
    assert work(chains, [2] * 44) == (0, 11)
    assert work(chains, [2] * 44) == (0, 11)
    assert work(chains, [1] * 40) == (10, 0)
    assert work(chains, [1] * 44) == (10, 1)
    assert chains.num_tokens == 40


def test_remembered_tokens_are_not_the_callers() -> None:
    chains = Chains(SCHEME, max_tokens=100)
    tokens = np.arange(40, dtype=np.int32)
    chains.hashes_of(tokens)
    tokens[:] = 7
    assert work(chains, [7] * 40) == (0, 10)
    assert work(chains, list(range(40))) == (10, 0)


def test_no_room_means_no_memory() -> None:
    chains = Chains(SCHEME, max_tokens=0)
    assert work(chains, [1] * 40) == (0, 10)
    assert work(chains, [1] * 40) == (0, 10)
    assert chains.num_tokens == 0


def test_prompts_without_a_full_block_have_no_hashes() -> None:
    chains = Chains(SCHEME, max_tokens=100)
    assert chains.hashes_of([]) == chains.hashes_of([1, 2, 3]) == []
    assert chains.num_tokens == 0


def test_what_cannot_be_hashed_is_refused_and_nothing_is_remembered() -> None:
    chains = Chains(SCHEME, max_tokens=100)
    with pytest.raises(BadPrompt, match="tokens: expected integers"):
        chains.hashes_of([1] * 39 + [2**31])
    assert work(chains, [1] * 40) == (0, 10)
    with pytest.raises(ValueError, match="max_tokens: expected at least 0, got -1"):
        Chains(SCHEME, max_tokens=-1)
