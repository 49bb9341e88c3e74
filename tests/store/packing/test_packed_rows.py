"""What engines save packed, others load to the byte; roots that hold both are right for both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdconn.store.budget.accounts import recorded_usage
from pdconn.store.budget.root_budget import RootBudget
from pdconn.store.engine.build import _check_whole_heads
from pdconn.store.format import footer as footer_module
from pdconn.store.format import seals
from pdconn.store.format.exponents import HeadPacking
from pdconn.store.format.footer import decode_footer, encode_footer, row_nbytes
from pdconn.store.format.row import Packing, StoreLayout, share_layout, store_layout
from pdconn.store.format.row_names import RowNames
from pdconn.store.rank import packed_shares, tasks
from pdconn.store.settings import StoreSettings, read_store_settings
from pdconn.store.shelf.files_shelf import FilesShelf
from pdconn.store.shelf.obj.bucket import BucketPlace
from pdconn.store.store_errors import RowDamaged, StoreSettingError
from pdconn.tools.cli.main import main
from tests.store.encryption.engines import everything, leaked, secrets_of
from tests.store.encryption.key_files import KEYS, key_file
from tests.store.encryption.test_tools import verified
from tests.store.joined.rig import FakeEngine, Model, Shape, until_ready
from tests.store.joined.test_joined import MODELS, SHAPES, prompt
from tests.store.packing.engines import (
    ALL,
    LOADED,
    NONE,
    SOME,
    TOKENS,
    engine,
    found,
    model,
    rows_of,
    saved,
    settings,
)
from tests.store.rank.engines import Shape as RankShape

PAGE = 4096
FITTING = pytest.mark.parametrize("fitting", [ALL, SOME, NONE], ids=["all", "some", "none"])


@pytest.fixture(params=["files", "posix", "obj"])
def on_shelf(request: pytest.FixtureRequest, tmp_path: Path) -> StoreSettings:
    """Settings on each shelf."""
    if request.param != "files":
        pytest.importorskip("nixl", reason="the shelf needs nixl")
    given = settings(tmp_path / "root", shelf=request.param)
    if request.param == "obj":
        pytest.importorskip("moto.server", reason="the shelf obj is tested against moto's server")
        request.getfixturevalue("server")
        place: BucketPlace = request.getfixturevalue("place")
        bucket = f"{place.bucket}/{place.prefix}".rstrip("/")
        given = replace(given, bucket=bucket, endpoint=place.endpoint, region=place.region)
    return given


@FITTING
@pytest.mark.parametrize("key", [False, True], ids=["plain", "encrypted"])
def test_what_one_engine_saved_another_loads_whatever_fitted(
    on_shelf: StoreSettings, fitting: tuple[int, ...], key: bool, tmp_path: Path
) -> None:
    given = on_shelf
    if key:
        given = replace(given, key_file=key_file(tmp_path / "keys", KEYS[0]))
    saved(given, model(fitting), Shape(tp=2))
    assert found(given, model(fitting), Shape(tp=4, layout="BHLNC", block_tokens=32)) == LOADED


@pytest.mark.parametrize("like", MODELS.values(), ids=MODELS)
def test_windows_chunks_and_compressors_come_back_too(like: Model, tmp_path: Path) -> None:
    of = replace(like, token_nbytes=256, like_bfloat16=SOME)
    saved(settings(tmp_path), of, SHAPES["packed"])
    assert found(settings(tmp_path), of, SHAPES["packed, four ranks"]) >= 192


@pytest.mark.parametrize("heads", [1, 2])
@FITTING
def test_ranks_that_hold_the_same_heads_divide_the_rows(
    heads: int, fitting: tuple[int, ...], tmp_path: Path
) -> None:
    of = replace(model(fitting), heads=heads)
    saved(settings(tmp_path), of, Shape(tp=4))
    assert found(settings(tmp_path), of, Shape(tp=2)) == LOADED


def sizes(layout: StoreLayout, packing: Packing) -> set[int]:
    assert layout.wa is not None
    return {row_nbytes(one.packed_as(packing)) for one in (layout.fa, layout.wa)}


def test_a_row_whose_heads_fit_is_smaller_and_no_row_is_larger_than_a_plain_one(
    tmp_path: Path,
) -> None:
    layouts = {}
    for name, fitting in (("all", ALL), ("some", SOME), ("none", NONE)):
        with engine(settings(tmp_path / name), model(fitting)) as made:
            layouts[name] = made.layout
            made.run(TOKENS)
            made.settle()
    saved(settings(tmp_path / "plain", compression="none"), model(ALL))
    plain = {path.stat().st_size for path in rows_of(tmp_path / "plain")}
    held = {
        name: {path.stat().st_size for path in rows_of(tmp_path / name)}
        for name in ("all", "some", "none")
    }
    assert held["all"] == sizes(layouts["all"], Packing.PACKED)
    assert held["some"] == held["none"] == sizes(layouts["none"], Packing.SPILLED)
    assert max(held["none"]) == max(plain)
    assert sum(held["all"]) < 0.9 * sum(plain)


@FITTING
@pytest.mark.parametrize("is_sealed", [False, True])
def test_the_root_counts_what_rows_have_and_nothing_stays_reserved_for_them(
    fitting: tuple[int, ...], is_sealed: bool, tmp_path: Path
) -> None:
    key = key_file(tmp_path / "keys", KEYS[0]) if is_sealed else None
    given = settings(tmp_path / "root", key_file=key)
    with engine(given, model(fitting)) as made:
        made.run(TOKENS)
        made.settle()
        check_reserve(given, made)


def check_reserve(given: StoreSettings, made: FakeEngine) -> None:
    """What is committed are the rows' bytes, and what is reserved can be taken."""
    usage = recorded_usage(Path(given.root))
    assert usage is not None
    there = sum(path.stat().st_size for path in rows_of(Path(given.root)))
    assert usage.committed == there, "counted"
    room = made.store._keeper._room
    assert room is not None
    give_up = time.monotonic() + 2
    while usage.reserved != room.amount and time.monotonic() < give_up:
        # The store fills its room up again by itself, perhaps between these two looks.
        time.sleep(0.05)
        usage = recorded_usage(Path(given.root))
        assert usage is not None
    assert usage.reserved == room.amount, "reserved"


def test_bytes_that_are_not_returned_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(RootBudget, "release_bytes", lambda self, nbytes: None)
    given = settings(tmp_path)
    with engine(given) as made:
        made.run(TOKENS)
        made.settle()
        with pytest.raises(AssertionError, match="reserved"):
            check_reserve(given, made)


def held_bytes(root: Path, salt: str | None = None) -> list[int]:
    """Bytes of each row that is there, of all tenants or of one."""
    label = RowNames().tenant(salt)
    with FilesShelf(root) as shelf:
        return [row.nbytes for row in shelf.rows() if not salt or row.name.tenant == label]


def test_more_packed_rows_than_plain_ones_are_kept_in_the_same_bytes(tmp_path: Path) -> None:
    counts = {}
    for compression in ("none", "exponents"):
        given = settings(tmp_path / compression, compression=compression, capacity=4 << 20)
        with engine(given) as made:
            for number in range(10):
                made.run(prompt(number, 330))
                made.settle()
                until_ready(made)
                assert sum(held_bytes(Path(given.root))) <= given.capacity
        counts[compression] = len(held_bytes(Path(given.root)))
    assert counts["exponents"] > counts["none"]


@pytest.mark.parametrize("quota", [2 << 20, None])
def test_a_quota_is_of_the_bytes_that_packed_rows_have(quota: int | None, tmp_path: Path) -> None:
    """Held to a row, and not held where there is none: the control."""
    given = settings(tmp_path, capacity=6 << 20, tenant_quota=quota)
    with engine(given) as made:
        for number in range(2):
            made.run(prompt(number, 200), salt="ours")
            made.settle()
        before = held_bytes(tmp_path, "ours")
        assert 1 << 20 < sum(before) < 2 << 20
        for number in range(100, 112):
            made.run(prompt(number, 330), salt="theirs")
            made.settle()
            until_ready(made)
    is_held = sum(held_bytes(tmp_path, "ours")) >= sum(before) - max(before)
    assert is_held == (quota is not None)


@pytest.mark.parametrize("names", [("packed", "plain"), ("same", "same")])
def test_packed_and_plain_engines_on_one_root_are_both_right(
    names: tuple[str, str], tmp_path: Path
) -> None:
    """The namespaces differ, since layouts do; even in one, nothing of the other is served."""
    packed = settings(tmp_path)
    plain = replace(packed, compression="none")
    for given, name in ((packed, names[0]), (plain, names[1])) * 2:
        with engine(given, model(SOME), writer=f"{given.compression}", namespace=name) as made:
            outcome = made.run(TOKENS)
            assert outcome.wrong == 0
            made.settle()
    if names[0] != names[1]:
        assert outcome.loaded == LOADED
    footers = [decode_footer(path.read_bytes()) for path in rows_of(tmp_path)]
    assert all(made.namespace in names for made in footers)


def test_packed_layouts_are_other_layouts_and_plain_ones_are_as_they_were() -> None:
    """Layouts are part of namespaces: roots of before are read on."""
    ranks = [RankShape(row_nbytes=256).side(PAGE, 1).ranks[0]]
    plain = store_layout(ranks, 64)
    assert plain.encoded() != plain.packed().encoded() != plain.packed().sealed().encoded()
    assert b"packing" not in plain.encoded()
    assert plain.packed().packed() == plain.packed()


@FITTING
def test_a_flipped_byte_anywhere_is_never_served(fitting: tuple[int, ...], tmp_path: Path) -> None:
    saved(settings(tmp_path), model(fitting), Shape())
    with engine(settings(tmp_path), model(fitting), Shape()) as made:
        layout = made.layout.fa
    path = next(one for one in rows_of(tmp_path) if one.suffix == ".0")
    whole = path.read_bytes()
    footer = decode_footer(whole)
    held = layout if footer.data_nbytes == layout.data_nbytes else layout.most
    assert (held is layout) == (fitting == ALL)
    used = [
        slab
        for number, slab in enumerate(held.slabs)
        if slab.spilled is None or footer.has_slab(number)
    ]
    places = {slab.offset + at for slab in used for at in (0, slab.nbytes // 2, slab.nbytes - 1)}
    for at in sorted(places | {len(whole) - 20, footer.data_nbytes + 3}):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert found(settings(tmp_path, read_only=True), model(fitting), Shape()) == 0
    for end in (0, 4096, layout.data_nbytes, len(whole) - 4096):
        path.write_bytes(whole[:end])
        assert found(settings(tmp_path, read_only=True), model(fitting), Shape()) == 0
    path.write_bytes(whole)
    assert found(settings(tmp_path, read_only=True), model(fitting), Shape()) == LOADED


def test_without_verification_a_flipped_byte_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    saved(settings(tmp_path), model(), Shape())
    path = next(one for one in rows_of(tmp_path) if one.suffix == ".0")
    data = bytearray(path.read_bytes())
    data[5] ^= 4
    path.write_bytes(data)
    monkeypatch.setattr(tasks, "check_sums", lambda *args: None)
    with engine(settings(tmp_path), model(), Shape(), writer="b") as theirs:
        outcome = theirs.run(TOKENS)
    assert (outcome.loaded, outcome.wrong) == (LOADED, 1)


def _forgets_spills(patch: pytest.MonkeyPatch) -> None:
    pack = packed_shares.pack_share

    def forgets(*args: object) -> list[object]:
        return [slab for slab in pack(*args) if slab.spilled is None]  # type: ignore[arg-type]

    patch.setattr("pdconn.store.rank.row_writer.pack_share", forgets)


def _takes_what_does_not_fit_for_packed(patch: pytest.MonkeyPatch) -> None:
    unpack = packed_shares.unpack_share
    patch.setattr(
        "pdconn.store.rank.tasks.unpack_share",
        lambda heads, has_slab, *views: unpack(heads, lambda number: False, *views),
    )


@pytest.mark.parametrize("wrong", [_forgets_spills, _takes_what_does_not_fit_for_packed])
def test_a_store_that_loses_spills_is_caught(
    wrong: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of round trips: what is unpacked of other bytes is wrong, or refused."""
    wrong(monkeypatch)
    saved(settings(tmp_path), model(SOME))
    try:
        loaded = found(settings(tmp_path), model(SOME))
    except AssertionError:
        return
    assert loaded < LOADED


def test_a_reader_that_knows_plain_rows_alone_refuses_packed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there were packed rows, footers ended with one of two magic numbers."""
    saved(settings(tmp_path / "packed"), model(SOME))
    saved(settings(tmp_path / "plain", compression="none"), model(SOME))
    magics = {magic: kind for magic, kind in footer_module._KINDS.items() if not kind[1]}
    assert set(magics) == {b"pdconnS1", b"pdconnE1"}
    monkeypatch.setattr(footer_module, "_KINDS", magics)
    for path in rows_of(tmp_path / "plain"):
        decode_footer(path.read_bytes())
    for path in rows_of(tmp_path / "packed"):
        with pytest.raises(RowDamaged, match="at its end, got b'pdconnP1'"):
            decode_footer(path.read_bytes())


@FITTING
def test_an_encrypted_packed_root_tells_nothing_and_is_served_to_its_key_alone(
    fitting: tuple[int, ...], tmp_path: Path
) -> None:
    root, keys = tmp_path / "root", key_file(tmp_path / "keys", KEYS[0])
    given = settings(root, key_file=keys)
    with engine(given, model(fitting)) as made:
        made.run(TOKENS)
        made.settle()
        secrets = secrets_of(made)
    assert leaked(everything(root), secrets) == set()
    assert found(given, model(fitting)) == LOADED
    other = replace(given, key_file=key_file(tmp_path / "other", KEYS[1]))
    assert found(replace(other, read_only=True), model(fitting)) == 0
    for path in rows_of(root):
        data = bytearray(path.read_bytes())
        data[11] ^= 1
        path.write_bytes(data)
    assert found(replace(given, read_only=True), model(fitting)) == 0


def forge_fitting_heads(path: Path) -> None:
    """Say of a row that all of its heads fit, with checksums that are sound."""
    data = path.read_bytes()
    footer = decode_footer(data)
    assert footer.seals is not None
    sums, proofs = footer.checksums.copy(), footer.seals.copy()
    sums[len(sums) // 2 :], proofs[len(sums) // 2 :] = 0, 0
    forged = replace(footer, checksums=sums, seals=proofs)
    path.write_bytes(data[: footer.data_nbytes] + encode_footer(forged))


@pytest.mark.parametrize("is_proven", [True, False])
def test_an_encrypted_head_is_not_served_as_a_packed_one(
    is_proven: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone who can write to the root can change footers; unless it is proven, they succeed."""
    if not is_proven:
        proof = seals._associated
        forgets = lambda *args, has_spill: proof(*args, has_spill=False)  # noqa: E731
        monkeypatch.setattr(seals, "_associated", forgets)
    keys = key_file(tmp_path / "keys", KEYS[0])
    given = settings(tmp_path / "root", key_file=keys)
    saved(given, model(NONE), Shape())
    path = next(one for one in rows_of(tmp_path / "root") if one.suffix == ".0")
    forge_fitting_heads(path)
    tried: list[int] = []
    unpack = HeadPacking.unpack_head

    def spied(self: HeadPacking, *views: memoryview) -> None:
        tried.append(1)
        unpack(self, *views)

    monkeypatch.setattr(HeadPacking, "unpack_head", spied)
    assert found(replace(given, read_only=True), model(NONE), Shape()) == 0
    assert bool(tried) == (not is_proven)


def test_heads_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    spilled = {}
    for name, fitting in (("all", ALL), ("some", SOME)):
        with engine(settings(tmp_path / name), model(fitting), Shape()) as made:
            made.run(TOKENS)
            made.settle()
            counts = made.rank_stores[0].take_rank_counts()
            spilled[name] = counts.get("heads_spilled", 0)
            rows = counts["rows_written"]
    assert spilled == {"all": 0, "some": rows}


def test_ranks_of_a_pipeline_are_refused_by_name(tmp_path: Path) -> None:
    """Their part of a head cannot be packed alone."""
    ranks = RankShape(stages=((0, 1), (2, 3)), row_nbytes=256).side(PAGE, 1).ranks
    shares = [share_layout([rank], 64) for rank in ranks]
    whole = store_layout(ranks, 64)
    _check_whole_heads(whole, shares)
    with pytest.raises(StoreSettingError, match=r"store\.compression: expected 'none' where ranks"):
        _check_whole_heads(whole.packed(), shares)


@pytest.mark.parametrize("bad", ["zstd", True, None, 1])
def test_compression_is_one_of_two(bad: object) -> None:
    with pytest.raises(StoreSettingError, match=r"store\.compression: expected none or exponents"):
        read_store_settings({"root": "/r", "capacity": "1GiB", "compression": bad})
    assert read_store_settings({"root": "/r", "capacity": "1GiB"}).compression == "none"


@FITTING
def test_tools_list_packed_rows_and_find_what_was_flipped(
    fitting: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path)
    saved(settings(tmp_path), model(fitting), Shape())
    rows = rows_of(tmp_path)
    for command in ("ls", "stat"):
        assert main(["store", command, root]) == 0
    capsys.readouterr()
    assert verified(capsys, tmp_path) == (0, {"good": len(rows)}, [])
    for path in rows[:2]:
        data = bytearray(path.read_bytes())
        data[5] ^= 1
        path.write_bytes(data)
    code, states, _ = verified(capsys, tmp_path, "--drop-bad")
    assert (code, states) == (1, {"good": len(rows) - 2, "damaged": 2})
    assert rows_of(tmp_path) == rows[2:]


def test_a_flipped_byte_of_a_spill_is_found_by_the_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows in which no head fits end with a spill."""
    saved(settings(tmp_path), model(NONE), Shape())
    path = rows_of(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[decode_footer(data).data_nbytes - 1] ^= 1
    path.write_bytes(data)
    code, states, _ = verified(capsys, tmp_path)
    assert (code, states["damaged"]) == (1, 1)
