"""Compatibility: a digest when all is equal, every difference by name when it is not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn.lender.server import Lender
from pdconn.planning.comparison import compare
from pdconn.protocol.compat import (
    DRAFT,
    UNPROVEN,
    WEIGHTS,
    trait_differences,
    traits_digest,
)
from pdconn.protocol.messages import PROTOCOL_VERSION, Described, RankGeometry, Welcome
from pdconn.sidechannel.describe import describe
from pdconn.tools.cli.main import main
from registration.references import AttentionKind, GroupMemory, build_kv_cache_references
from tests.fakes.layouts import layout_memory
from tests.fakes.pair import Pair

TRAITS = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=4)


@given(TRAITS, TRAITS)
def test_digests_are_equal_exactly_when_no_field_differs(
    ours: dict[str, str], theirs: dict[str, str]
) -> None:
    assert (traits_digest(ours) == traits_digest(theirs)) == (ours == theirs)
    differences = trait_differences(ours, theirs)
    assert {d.field for d in differences} == {
        name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)
    }


DRAFTER = {"speculative_config.method": "eagle", "speculative_config.model": "head"}
PLAIN = {"model": "m"}


def test_only_a_reader_with_a_drafter_needs_one() -> None:
    drafting, other = PLAIN | DRAFTER, PLAIN | DRAFTER | {"speculative_config.model": "other"}
    assert trait_differences(PLAIN, drafting) == ()
    assert [str(d) for d in trait_differences(drafting, PLAIN)] == [
        "speculative_config.method: theirs nothing, ours eagle"
    ], "the one that tells it all"
    assert [str(d) for d in trait_differences(drafting, other)] == [
        "speculative_config.model: theirs other, ours head"
    ]
    assert [d.field for d in trait_differences({"model": "n"}, drafting)] == ["model"], "control"


PROOFS = st.frozensets(st.sampled_from(["commit:a", "commit:b", "files:a", "dummy:0"]), max_size=3)


@given(PROOFS, PROOFS, st.sampled_from([WEIGHTS, DRAFT + WEIGHTS]))
def test_weights_agree_if_they_have_a_proof_in_common_and_never_without_one(
    ours: frozenset[str], theirs: frozenset[str], name: str
) -> None:
    """Not even with themselves; words of a doubt are no proofs."""
    one, other = (
        PLAIN | DRAFTER | {name: " ".join(sorted(proofs)) or f"{UNPROVEN}no commit:a"}
        for proofs in (ours, theirs)
    )
    differ = bool(trait_differences(one, other))
    assert differ == ours.isdisjoint(theirs)


def test_a_peer_that_says_nothing_of_its_weights_is_refused_by_name() -> None:
    """Of a version before, were it not refused for that."""
    said = PLAIN | {WEIGHTS: "files:a"}
    assert [str(d) for d in trait_differences(said, PLAIN)] == [
        "weights: theirs nothing, ours files:a"
    ]
    assert [str(d) for d in trait_differences(PLAIN, said)] == [
        "weights: theirs files:a, ours nothing"
    ]
    assert trait_differences(PLAIN, PLAIN) == (), "two of before"


def test_a_lender_with_a_drafter_serves_a_reader_without() -> None:
    with Pair(traits={"model": "tiny", "kv_dtype": "fp8"} | DRAFTER) as pair:
        pair.pull("d", pair.lend("r"))
        assert "speculative_config" not in str(pair.outcome_of("d"))
    with Pair(traits={"model": "tiny"} | DRAFTER) as pair:
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None


def test_a_drafter_of_one_side_is_shown_for_the_side_that_has_it() -> None:
    comparison = compare(engine(traits=PLAIN | DRAFTER), engine(traits=PLAIN))
    assert (comparison.traits, comparison.b_pulls) == ((), ())
    [missing] = comparison.a_pulls
    assert str(missing) == "speculative_config.method: theirs nothing, ours eagle"
    other = compare(engine(traits=PLAIN | DRAFTER), engine(traits={"model": "n"}))
    assert [d.field for d in other.traits] == ["model"]


def test_every_trait_that_differs_is_in_the_error() -> None:
    theirs = {"model": "other", "kv_dtype": "fp8", "packing": "x"}
    with Pair(traits=theirs) as pair:
        pair.pull("d", pair.lend("r"))
        text = str(pair.outcome_of("d"))
    assert "kv_dtype: theirs fp8, ours nothing" in text
    assert "model: theirs other, ours tiny" in text
    assert "packing: theirs x, ours nothing" in text


def test_a_lender_without_traits_is_refused_by_a_reader_that_asks() -> None:
    with Pair(traits={}) as pair:
        pair.pull("d", pair.lend("r"))
        assert "model: theirs nothing, ours tiny" in str(pair.outcome_of("d"))


def test_a_digest_that_is_not_of_its_traits_is_refused() -> None:
    with Pair(traits={"model": "other"}) as pair:
        pair.lender.close()
        lie = msgspec.structs.replace(pair.welcome(), digest=traits_digest({"model": "tiny"}))
        pair.lender = Lender(lie, "127.0.0.1", 0)
        pair.pull("d", pair.lend("r"))
        assert "digest: expected" in str(pair.outcome_of("d"))


def engine(
    layout: str = "BHLNC",
    *,
    tp: int = 1,
    heads: int = 4,
    block: int = 4,
    opaque: bool = False,
    window: int | None = None,
    layers: tuple[str, ...] = ("a", "b"),
    token_nbytes: int = 8,
    ratio: int = 1,
    traits: dict[str, str] | None = None,
) -> Described:
    """What an engine of ``tp`` ranks says of itself."""
    kind = AttentionKind.FULL if window is None else AttentionKind.SLIDING_WINDOW
    ranks = []
    for rank in range(tp):
        memory = layout_memory(
            layout,
            base=(rank + 1) << 20,
            num_blocks=8,
            layers=layers,
            num_heads=heads // tp,
            block_tokens=block // ratio,
            token_nbytes=token_nbytes,
            first_head=rank * heads // tp,
            opaque=opaque,
        )
        references = build_kv_cache_references([GroupMemory(kind, window, block, memory)])
        ranks.append(RankGeometry(0, rank, b"secret", references))
    return Described.from_welcome(
        Welcome.in_our_version("e", "boot", traits or {"model": "m"}, tuple(ranks))
    )


def test_other_layouts_block_sizes_and_tensor_parallelism_are_differences_that_are_served() -> None:
    comparison = compare(engine("LBHNC", tp=2, block=8), engine("BHLNC"))
    assert comparison.compatible
    shown = {d.field: (d.theirs, d.ours) for d in comparison.shapes}
    assert shown["tensor parallel ranks"] == ("2", "1")
    assert shown["full_attention: block_tokens"] == ("8", "4")
    assert shown["full_attention: heads of a rank"] == ("2", "4")
    assert shown["full_attention: memory order"] == (
        "layer, block, head, token", "block, head, layer, token",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (
            engine(opaque=True, block=8),
            engine(opaque=True),
            ["layer a: block_tokens of blocks that only move whole: theirs 8, ours 4"],
        ),
        (
            engine(opaque=True),
            engine(),
            ["layer a: blocks opaque in tokens: theirs opaque, ours by token"],
        ),
        (
            engine(window=8),
            engine(window=16),
            ["layer a: window: theirs 8, ours 16", "layer b: window: theirs 8, ours 16"],
        ),
        (
            engine(window=8),
            engine(),
            [
                "layer a: kind: theirs sliding_window, ours full_attention",
                "layer b: kind: theirs sliding_window, ours full_attention",
            ],
        ),
        (
            engine(token_nbytes=4),
            engine(),
            ["layer a: bytes per token and head: theirs 4, ours 8"],
        ),
        (
            engine(token_nbytes=4, opaque=True),
            engine(opaque=True),
            ["layer a: bytes per head: theirs 16, ours 32"],
        ),
        (engine(ratio=2), engine(), ["layer a: tokens per stored row: theirs 2.0, ours 1.0"]),
        (engine(layers=("a",)), engine(), ["layer b chunk 0: theirs not held, ours held"]),
        (
            engine(heads=2),
            engine(),
            [
                "head 2 of layer a: theirs not held, ours needed",
                "head 2 of layer b: theirs not held, ours needed",
            ],
        ),
    ],
)
def test_what_the_planner_refuses_is_named_with_both_values(
    theirs: Described, ours: Described, expected: list[str]
) -> None:
    comparison = compare(theirs, ours)
    assert not comparison.compatible
    assert [str(difference) for difference in comparison.b_pulls] == expected


def test_compressed_rows_of_unequal_blocks_are_served() -> None:
    assert compare(engine(ratio=4, block=12), engine(ratio=4, block=8)).compatible


def test_a_lender_that_keeps_whole_prompts_serves_any_window() -> None:
    comparison = compare(engine(), engine(window=8))
    assert comparison.b_pulls == ()
    assert any("kind" in d.field for d in comparison.a_pulls)


def test_ranks_that_disagree_on_their_groups_are_refused() -> None:
    [one] = engine().ranks
    more = build_kv_cache_references(
        [GroupMemory(AttentionKind.FULL, None, 4, ()), GroupMemory(AttentionKind.FULL, None, 4, ())]
    )
    theirs = msgspec.structs.replace(engine(), ranks=(one, RankGeometry(1, 0, b"", more)))
    [refused] = compare(theirs, engine()).b_pulls
    assert str(refused) == "KV cache groups of the ranks: theirs 1 and 2, ours as many on each"


def test_a_lender_without_any_kv_is_refused_also_by_a_reader_that_needs_none() -> None:
    nothing = build_kv_cache_references([GroupMemory(AttentionKind.FULL, None, 4, ())])
    empty = msgspec.structs.replace(engine(), ranks=(RankGeometry(0, 0, b"", nothing),))
    why = "KV of the lender: theirs nothing, ours needed"
    assert [str(refused) for refused in compare(empty, empty).b_pulls] == [why]
    both = [why, "layer a chunk 0: theirs not held, ours held"]
    assert [str(refused) for refused in compare(empty, engine(layers=("a",))).b_pulls] == both
    assert compare(engine(), empty).b_pulls == ()


def test_a_description_tells_no_address() -> None:
    described = engine()
    assert all(rank.address == b"" for rank in described.ranks)
    assert {tensor.base for rank in described.ranks for tensor in rank.references.tensors} == {4096}


def test_a_running_lender_describes_itself_and_goes_on_serving() -> None:
    with Pair() as pair:
        described = describe("127.0.0.1", pair.lender.port)
        assert described.engine_id == "prefill"
        assert described.ranks[0].references.groups == pair.theirs.references.groups
        pair.pull("d", pair.lend("r"))
        assert pair.outcome_of("d") is None


def test_diff_of_a_running_lender_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "decode.json"
    file.write_bytes(msgspec.json.encode(engine(traits={"model": "m", "kv_dtype": "fp8"})))
    with Pair() as pair:
        assert main(["diff", f"127.0.0.1:{pair.lender.port}", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert {d["field"] for d in document["traits"]} == {"model", "kv_dtype"}
    assert not document["compatible"]


def test_diff_of_equal_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "prefill.json"
    with Pair() as pair:
        where = f"127.0.0.1:{pair.lender.port}"
        assert main(["diff", where, "--save", str(saved)]) == 0
        assert main(["diff", where, str(saved)]) == 0
    text = capsys.readouterr().out
    assert "no difference" in text
    assert f"{saved} can pull from {where}" in text


def test_the_table_tells_what_is_refused_from_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_bytes(msgspec.json.encode(engine(block=8, traits={"model": "x"})))
    files[1].write_bytes(msgspec.json.encode(engine()))
    assert main(["diff", *map(str, files)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("model" in line and line.endswith("refused") for line in lines)
    assert any("block_tokens" in line and line.endswith("differs") for line in lines)
    at = lines.index(f"{files[0]} cannot pull from {files[1]}:")
    assert lines[at + 1].strip() == "model: theirs m, ours x"


def test_other_versions_cannot_pull() -> None:
    newer = msgspec.structs.replace(engine(), version=99)
    comparison = compare(newer, engine())
    ours = PROTOCOL_VERSION
    assert [str(refused) for refused in comparison.b_pulls] == [f"version: theirs 99, ours {ours}"]
    assert [str(refused) for refused in comparison.a_pulls] == [f"version: theirs {ours}, ours 99"]


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "1e300"])
def test_a_timeout_that_is_none(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["diff", "localhost:1", "localhost:2", "--timeout", seconds])
    assert stopped.value.code == 2
    assert "--timeout" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["[]", "null"])
def test_a_description_without_ranks(
    ranks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(
        '{"type": "described", "version": 1, "engine_id": "e", "incarnation": "b", '
        f'"traits": {{}}, "ranks": {ranks}}}',
        encoding="utf-8",
    )
    assert main(["diff", str(file), str(file)]) == 2
    assert "ranks" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["nowhere", "host:0", "host:70000", ":5600", "a..b:80"])
def test_a_place_that_is_none(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", where, where]) == 2
    text = capsys.readouterr().err
    assert "expected HOST:PORT or an existing file" in text or "is not a host name" in text


def test_a_file_that_is_no_description(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"version": 1}', encoding="utf-8")
    assert main(["diff", str(file), str(file)]) == 2
    assert "expected an engine's description" in capsys.readouterr().err


def test_an_engine_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert main(["diff", f"127.0.0.1:{port}", "--save", "x", "--timeout", "0.2"]) == 2
    assert "no answer in 0.2 s" in capsys.readouterr().err
