"""Blocks have the hashes that vLLM's own code gives them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pdconn.router.prefix.hashing import (
    ALGORITHMS,
    DEFAULT_SEED,
    BadPrompt,
    BadScheme,
    Extras,
    HashScheme,
    MultimodalItem,
    as_array,
    chain,
    external,
)

pytestmark = pytest.mark.usefixtures("in_both")

EVERY = tuple(ALGORITHMS)
EDGES = (0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1)
TOKEN = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**31 - 1))
TOKENS = st.one_of(st.lists(TOKEN, max_size=30), st.lists(TOKEN, min_size=40, max_size=90))
TEXT = st.text(max_size=6)
# Few names, so that the same image often comes twice in a block.
ITEMS = st.lists(
    st.builds(
        MultimodalItem,
        identifier=st.sampled_from(("a", "cat", "dog", "mm")),
        offset=st.integers(0, 90),
        length=st.integers(0, 40),
    ),
    max_size=5,
).map(lambda items: tuple(sorted(items, key=lambda item: item.offset)))
EXTRAS = st.builds(
    Extras,
    lora=st.none() | st.tuples(TEXT.filter(bool), TEXT.filter(bool)),
    cache_salt=st.none() | TEXT,
    items=ITEMS,
)
WHOLE = Extras(
    lora=("sql", "/adapters/sql"),
    cache_salt="tenant",
    items=(
        MultimodalItem("cat", 3, 20),
        MultimodalItem("dog", 25, 2),
        MultimodalItem("cat", 28, 2),
    ),
)
PROMPT = list(range(100, 164))


def scheme_of(algorithm: str, block_tokens: int = 8, seed: str | None = "7") -> HashScheme:
    return HashScheme(algorithm, block_tokens, seed)


class Vllm(NamedTuple):
    """The parts of vLLM that hash."""

    utils: Any
    hashing: Any
    Request: Any
    SamplingParams: Any
    LoRARequest: Any
    MultiModalFeatureSpec: Any
    PlaceholderRange: Any

    def request(self, tokens: list[int], extras: Extras, hasher: Any = None) -> Any:
        """A request as it reaches the engine's core: with strings decoded one by one."""
        lora, salt, items = msgspec.msgpack.decode(
            msgspec.msgpack.encode((extras.lora, extras.cache_salt, extras.items))
        )
        return self.Request(
            request_id="r",
            prompt_token_ids=list(tokens),
            sampling_params=self.SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=[
                self.MultiModalFeatureSpec(
                    data=None,
                    modality="image",
                    identifier=item["identifier"],
                    mm_position=self.PlaceholderRange(item["offset"], item["length"]),
                )
                for item in items
            ],
            lora_request=lora and self.LoRARequest(lora[0], 1, lora[1]),
            cache_salt=salt,
            block_hasher=hasher,
        )

    def hashes(self, scheme: HashScheme, tokens: list[int], extras: Extras) -> list[bytes]:
        with pytest.MonkeyPatch.context() as patch:
            if scheme.seed is None:
                patch.delenv("PYTHONHASHSEED", raising=False)
            else:
                patch.setenv("PYTHONHASHSEED", scheme.seed)
            for name in ("NONE_HASH", "_NONE_HASH_SEED"):  # put back what init sets
                patch.setattr(self.utils, name, None, raising=False)
            hash_fn = self.hashing.get_hash_fn_by_name(scheme.algorithm)
            self.utils.init_none_hash(hash_fn)
            hasher = self.utils.get_request_block_hasher(scheme.block_tokens, hash_fn)
            return list(self.request(tokens, extras, hasher).block_hashes)


@pytest.fixture(scope="module")
def vllm() -> Vllm:
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    hashing = pytest.importorskip("vllm.utils.hashing")
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    return Vllm(
        utils, hashing, Request, SamplingParams, LoRARequest, MultiModalFeatureSpec,
        PlaceholderRange,
    )  # fmt: skip


@pytest.mark.parametrize("algorithm", EVERY)
@given(tokens=TOKENS, extras=EXTRAS, block_tokens=st.integers(1, 33), seed=TEXT)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_hashes_are_those_of_vllm(
    vllm: Vllm, *, algorithm: str, tokens: list[int], extras: Extras, block_tokens: int, seed: str
) -> None:
    assume("\0" not in seed)  # no environment variable has one
    scheme = HashScheme(algorithm, block_tokens, seed)
    hashes = chain(scheme, tokens, extras)
    assert hashes == vllm.hashes(scheme, tokens, extras)
    assert len(hashes) == len(tokens) // block_tokens


@pytest.mark.parametrize("algorithm", EVERY)
def test_adapter_salt_and_images_together_are_those_of_vllm(vllm: Vllm, algorithm: str) -> None:
    scheme = scheme_of(algorithm)
    assert chain(scheme, PROMPT, WHOLE) == vllm.hashes(scheme, PROMPT, WHOLE)
    assert chain(scheme, PROMPT, WHOLE) != vllm.hashes(scheme, PROMPT, Extras())


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 60), (10, 10)],
        [(0, 20), (10, 30)],
        [(0, 60), (10, 10), (30, 5), (40, 24)],
        [(8, 0), (9, 0), (9, 5), (16, 8)],
        [(3, 60), (3, 0)],
    ],
)
def test_items_in_one_another_are_those_of_vllm(vllm: Vllm, spans: list[tuple[int, int]]) -> None:
    # As sound in a film.  vLLM's walk leaves some of them out, and so do we.
    extras = Extras(items=tuple(MultimodalItem(f"item {o}", o, n) for o, n in spans))
    scheme = scheme_of("sha256_cbor")
    assert chain(scheme, PROMPT, extras) == vllm.hashes(scheme, PROMPT, extras)
    assert chain(scheme, PROMPT, extras) != chain(scheme, PROMPT)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_cryptographic_algorithms_have_the_default_seed_of_vllm(vllm: Vllm, algorithm: str) -> None:
    unseeded = HashScheme(algorithm, 16)
    assert chain(unseeded, PROMPT) == vllm.hashes(unseeded, PROMPT, Extras())
    assert vllm.utils.DEFAULT_NONE_HASH_SEED == DEFAULT_SEED
    assert chain(unseeded, PROMPT) != chain(replace(unseeded, seed="0"), PROMPT)


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("block_tokens", [23, 24, 255, 256, 300])
def test_blocks_of_any_length_are_those_of_vllm(
    vllm: Vllm, algorithm: str, block_tokens: int
) -> None:
    tokens = list(range(0, 66000, 97))
    scheme = scheme_of(algorithm, block_tokens)
    assert chain(scheme, tokens) == vllm.hashes(scheme, tokens, Extras())


def test_an_external_hash_is_what_vllm_puts_into_events(
    vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    full = chain(scheme_of("sha256"), PROMPT) + chain(scheme_of("xxhash"), PROMPT)
    assert [external(h) for h in full] == [vllm.utils.maybe_convert_block_hash(h) for h in full]
    assert external(bytes(24) + b"\xff" + bytes(7)) == 0xFF << 56


def test_an_image_twice_in_a_block_is_pickled_twice(vllm: Vllm) -> None:
    # Pickle writes an object it has written before as a reference, so the same string object
    # twice gives other bytes than two equal ones, which is what an engine has.
    name = "cat of whiskers"
    extras = Extras(items=(MultimodalItem(name, 0, 2), MultimodalItem(name, 4, 2)))
    scheme = scheme_of("sha256")
    keys = (("mm", name, 0), ("mm", name, 4))
    as_one_object = vllm.hashing.sha256((scheme.root, tuple(PROMPT[:8]), keys))
    ours = chain(scheme, PROMPT[:8], extras)
    assert ours == vllm.hashes(scheme, PROMPT[:8], extras)
    assert ours != [as_one_object]


@given(
    algorithm=st.sampled_from(EVERY),
    tokens=TOKENS,
    extras=EXTRAS,
    block_tokens=st.integers(1, 20),
    data=st.data(),
)
def test_a_chain_continued_is_the_chain(
    algorithm: str, tokens: list[int], extras: Extras, block_tokens: int, data: st.DataObject
) -> None:
    scheme = scheme_of(algorithm, block_tokens)
    whole = chain(scheme, tokens, extras)
    known = whole[: data.draw(st.integers(0, len(whole)))]
    assert chain(scheme, tokens, extras, known) == whole


@pytest.mark.parametrize("algorithm", EVERY)
def test_known_hashes_are_not_computed_again(algorithm: str) -> None:
    scheme = scheme_of(algorithm)
    known = [b"x" * scheme.hash_nbytes, b"y" * scheme.hash_nbytes]
    continued = chain(scheme, PROMPT, known=known)
    assert continued[:2] == known
    assert not set(continued) & set(chain(scheme, PROMPT))


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("at", [0, 7, 8, 31, 63])
def test_another_token_changes_its_block_and_all_behind(algorithm: str, at: int) -> None:
    altered = list(PROMPT)
    altered[at] += 1
    before, after = (chain(scheme_of(algorithm), tokens) for tokens in (PROMPT, altered))
    same = [ours == theirs for ours, theirs in zip(before, after, strict=True)]
    assert same == [block < at // 8 for block in range(8)]


CAT = MultimodalItem("cat", 20, 8)
OTHERS: dict[str, tuple[Extras, int]] = {
    "salt": (Extras(cache_salt="other", items=(CAT,)), 0),
    "lora": (Extras(lora=("sql", "/a"), items=(CAT,)), 0),
    "image": (Extras(items=(replace(CAT, identifier="dog"),)), 2),
    "place of the image": (Extras(items=(replace(CAT, offset=21),)), 2),
    "end of the image": (Extras(items=(replace(CAT, length=13),)), 4),
    "second image": (Extras(items=(CAT, MultimodalItem("dog", 40, 1))), 5),
}


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("what", OTHERS)
def test_another_extra_changes_the_first_block_it_touches_and_all_behind(
    algorithm: str, what: str
) -> None:
    extras, first = OTHERS[what]
    scheme = scheme_of(algorithm)
    before, after = (chain(scheme, PROMPT, e) for e in (Extras(items=(CAT,)), extras))
    same = [ours == theirs for ours, theirs in zip(before, after, strict=True)]
    assert same == [block < first for block in range(8)]


def test_the_path_of_an_adapter_counts() -> None:
    here, there = (Extras(lora=("sql", path)) for path in ("/a", "/b"))
    scheme = scheme_of("sha256_cbor")
    assert not set(chain(scheme, PROMPT, here)) & set(chain(scheme, PROMPT, there))


def test_every_scheme_has_its_own_hashes() -> None:
    schemes = [HashScheme(a, size, s) for a in EVERY for size in (8, 16) for s in ("0", "1")]
    hashes = [full for scheme in schemes for full in chain(scheme, PROMPT)]
    assert len(set(hashes)) == len(hashes) == len(EVERY) * 2 * (8 + 4)


def test_an_empty_salt_is_none() -> None:
    scheme = scheme_of("sha256")
    assert chain(scheme, PROMPT, Extras(cache_salt="")) == chain(scheme, PROMPT)
    assert chain(scheme, PROMPT, Extras(cache_salt="x")) != chain(scheme, PROMPT)


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("of", [tuple, np.array, lambda tokens: np.array(tokens, np.int32)])
def test_any_sequence_of_tokens_will_do(algorithm: str, of: Callable[[list[int]], Any]) -> None:
    scheme = scheme_of(algorithm)
    assert chain(scheme, of(PROMPT), WHOLE) == chain(scheme, PROMPT, WHOLE)


def test_a_vector_of_tokens_is_taken_as_it_is() -> None:
    vector = np.arange(5, dtype=np.int32)
    assert as_array(vector) is vector


@pytest.mark.parametrize(
    ("fields", "field", "shown"),
    [
        (("md5", 16, None), "algorithm", r"one of sha256, .*, got 'md5'"),
        (("sha256", 0, None), "block_tokens", "at least 1, got 0"),
        (("sha256", 16.0, None), "block_tokens", "an integer of at least 1, got 16.0"),
        (("sha256", True, None), "block_tokens", "an integer of at least 1, got True"),
        (("sha256", 16, 5), "seed", "a string or None, got 5"),
        (("xxhash", 16, None), "seed", "PYTHONHASHSEED of the engines .* xxhash .* got None"),
        (("xxhash_cbor", 16, None), "seed", "PYTHONHASHSEED .* xxhash_cbor .* got None"),
    ],
)
def test_a_scheme_that_no_engine_has_is_refused(
    fields: tuple[Any, Any, Any], field: str, shown: str
) -> None:
    with pytest.raises(BadScheme, match=f"{field}: expected .*{shown}") as caught:
        HashScheme(*fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: Extras(items=(MultimodalItem("a", 5, 1), MultimodalItem("b", 4, 1))),
         r"items: expected an order by offset, got \[5, 4\]"),
        (lambda: Extras(items=(MultimodalItem("a", -1, 1),)), "items: expected offsets"),
        (lambda: Extras(items=(MultimodalItem("a", 1, -1),)), "items: expected offsets"),
        (lambda: Extras(cache_salt="\ud800"), "extras: expected text .* UTF-8"),
        (lambda: Extras(items=(MultimodalItem("\ud800", 1, 1),)), "extras: expected text"),
        (lambda: Extras(lora=("a", "\ud800")), "extras: expected text"),
        (lambda: chain(scheme_of("sha256"), [2**31]), r"tokens: expected integers of 0 to 2\*\*31"),
        (lambda: chain(scheme_of("sha256"), [3, -1]), "tokens: .*, got -1"),
        (lambda: chain(scheme_of("sha256"), [1.5]), "tokens: expected integers"),
        (lambda: chain(scheme_of("sha256"), PROMPT, known=[b""] * 9),
         "known: expected at most 8 hashes.* got 9"),
    ],
)  # fmt: skip
def test_a_prompt_that_no_engine_hashes_is_refused(make: Callable[[], object], shown: str) -> None:
    with pytest.raises(BadPrompt, match=shown):
        make()


def test_an_endless_image_costs_no_more_than_the_prompt() -> None:
    endless, until_the_end = (Extras(items=(MultimodalItem("a", 3, n),)) for n in (2**60, 61))
    scheme = scheme_of("sha256")
    assert chain(scheme, PROMPT, endless) == chain(scheme, PROMPT, until_the_end)
