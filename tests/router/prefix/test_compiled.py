"""The compiled part of the index is there, says what Python says, and takes no wrong argument."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconn import __version__
from pdconn.router.fleet.engine_registry import EngineRegistry
from pdconn.router.labels import IndexKind
from pdconn.router.prefix.compiled import extension
from pdconn.router.prefix.kv_events import BadBatch, Cleared, Removed, Stored, decode_batch
from pdconn.router.router_metrics import RouterMetrics
from tests.router.prefix.conftest import COMPILED
from tests.router.prefix.test_events import (
    CLEARED,
    JUNK,
    NEARLY,
    REMOVED,
    STORED,
    encode,
    plain,
    row,
)

needs_compiled = pytest.mark.skipif(COMPILED is None, reason="not built")


def test_it_is_there_where_there_is_a_compiler() -> None:
    """Else the tests that compare it with Python would all be skipped, and nobody would see."""
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    can_build = headers and any(map(shutil.which, ("c++", "g++", "clang++")))
    switched_off = os.environ.get(extension.VARIABLE, "0") not in ("", "0")
    assert COMPILED is not None or switched_off or not can_build, extension.why_not


@needs_compiled
@pytest.mark.parametrize(("value", "there"), [("0", True), ("1", False)])
def test_it_can_be_switched_off(value: str, there: bool) -> None:
    script = (
        "from pdconn.router.prefix.compiled import extension as e\n"
        "print(e.module is not None, e.why_not)"
    )
    environment = os.environ | {extension.VARIABLE: value}
    told = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert told == (f"{there}" if there else f"{there} {extension.VARIABLE} is set")


@pytest.mark.usefixtures("in_both")
def test_the_metrics_say_which_serves(request: pytest.FixtureRequest) -> None:
    page = RouterMetrics(EngineRegistry.from_members([])).registry
    serves = (IndexKind.PYTHON if "[python]" in request.node.name else IndexKind.COMPILED).value
    labels = {"version": __version__, "python": platform.python_version(), "index": serves}
    assert page.get_sample_value("pdconn_router_build_info", labels) == 1


# Decoding


def _outcome(payload: bytes) -> Any:
    """What a payload is decoded to, in a form to compare."""
    try:
        batch = decode_batch(payload)
    except BadBatch as error:
        return str(error)
    return batch.ts, [*map(plain, batch.events)], batch.rank, batch.num_undecodable


def _says_the_same(payload: bytes, module: Any = COMPILED) -> bool:
    """Whether a payload is decoded to the same with and without the compiled decoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "module", None)
        expected = _outcome(payload)
        patch.setattr(extension, "module", module)
        return bool(_outcome(payload) == expected)


EVENTS = st.sampled_from(
    [
        STORED,
        REMOVED,
        REMOVED | {"block_hashes": [(1 << 64) - 1, -7, bytes(range(32))]},
        REMOVED | {"locality": "REMOTE"},
        REMOVED | {"medium": "GPU"},
        REMOVED | {"medium": "A_Z[\\]^@{0}\x7f"},
        REMOVED | {"block_hashes": [-33, -200, -40_000, -(1 << 40)]},
        REMOVED | {"group_idx": None},
        STORED | {"token_ids": None, "extra_keys": None, "medium": None, "locality": "Remote"},
        STORED | {"token_ids": [*range(300)], "lora_name": "Ünic", "parent_block_hash": None},
        CLEARED,
    ]
)
PAYLOADS = st.builds(
    lambda events, form, more: encode([1.5, [*map(form, events)], *more]),
    st.lists(EVENTS, max_size=6),
    st.sampled_from([dict, row]),
    st.sampled_from([(), (3,), (None,), (0, "new", {"deep": [1]})]),
)


@needs_compiled
@given(PAYLOADS)
def test_what_vllm_writes_is_decoded_to_the_same(payload: bytes) -> None:
    assert _says_the_same(payload)


@needs_compiled
@given(st.lists(JUNK | NEARLY | EVENTS, max_size=4), JUNK)
def test_what_nobody_writes_is_decoded_to_the_same(events: list[Any], rank: Any) -> None:
    assert _says_the_same(encode([1.5, events, rank]))


@needs_compiled
@given(PAYLOADS, st.data())
def test_damaged_payloads_are_decoded_to_the_same(payload: bytes, data: Any) -> None:
    changed = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    assert _says_the_same(bytes(changed))
    assert _says_the_same(bytes(changed[:cut]))


def _map(*pairs: tuple[str, object]) -> bytes:
    """A payload of one event, a map whose keys may come twice."""
    event = bytes([0x80 | len(pairs)]) + b"".join(encode(one) for pair in pairs for one in pair)
    return b"\x92" + encode(1.5) + b"\x91" + event


REMOVED_PAIRS = tuple(REMOVED.items())


@needs_compiled
@pytest.mark.parametrize(
    "payload",
    [
        _map(*REMOVED_PAIRS, ("block_hashes", [8, 9])),
        _map(*REMOVED_PAIRS, ("medium", "GPU")),
        _map(*REMOVED_PAIRS, ("medium", None)),
        _map(*REMOVED_PAIRS, ("group_idx", None)),
        _map(*REMOVED_PAIRS, ("type", "AllBlocksCleared")),
        _map(*REMOVED_PAIRS, ("type", 7)),
        _map(*REMOVED_PAIRS[1:], REMOVED_PAIRS[0]),
        _map(*STORED.items(), ("parent_block_hash", None)),
        _map(("type", "AllBlocksCleared"), ("medium", 7), ("medium", [])),
    ],
    ids=repr,
)
def test_maps_with_keys_that_come_twice_are_decoded_to_the_same(payload: bytes) -> None:
    assert _says_the_same(payload)


def _forgets_the_rank(*sent: Any) -> Any:
    decoded = COMPILED.decode(*sent)  # type: ignore[union-attr]
    return decoded and (*decoded[:2], None)


def _takes_nothing_for_an_empty_batch(*sent: Any) -> Any:
    return COMPILED.decode(*sent) or (1.5, [], None)  # type: ignore[union-attr]


@needs_compiled
@pytest.mark.parametrize(
    ("wrong", "payload"),
    [
        (_forgets_the_rank, encode([1.5, [REMOVED], 3])),
        (_takes_nothing_for_an_empty_batch, encode([1.5, [REMOVED, 7], 3])),
    ],
)
def test_a_wrong_decoder_is_noticed(wrong: Callable[..., Any], payload: bytes) -> None:
    assert _says_the_same(payload)
    assert not _says_the_same(payload, SimpleNamespace(decode=wrong))


def _is_left_to_python(payload: bytes) -> bool:
    decoded = COMPILED.decode(payload, Stored, Removed, Cleared(), msgspec.Raw)  # type: ignore[union-attr]
    return decoded is None


@needs_compiled
def test_what_vllm_writes_is_not_left_to_python() -> None:
    """Else equal answers would show nothing."""
    vllm = pytest.importorskip("vllm.distributed.kv_events")
    stored = vllm.BlockStored([bytes(32), 7], None, [1, 2], 1, None, "GPU", None, [None, ("a",)])
    events = [stored, vllm.BlockRemoved([bytes(32)], medium=None), vllm.AllBlocksCleared()]
    batch = vllm.KVEventBatch(ts=2.5, events=events, data_parallel_rank=4)
    assert not _is_left_to_python(encode(batch))
    for form in (dict, row):
        sent = [*map(form, (STORED, REMOVED, CLEARED))]
        assert not _is_left_to_python(encode([1.5, sent, 0]))
        assert _is_left_to_python(encode([1.5, [*sent, 7], 0]))  # the control


# Arguments, memory


def _one_plane() -> Any:
    held = COMPILED.HeldBlocks()  # type: ignore[union-attr]
    held.add_word()
    held.add_plane()
    held.store(0, 0, [7], 1, True)
    return held


@needs_compiled
@pytest.mark.parametrize(
    ("error", "call"),
    [
        (IndexError, lambda held: held.store(64, 0, [1], 1, True)),
        (IndexError, lambda held: held.store(0, 1, [1], 1, True)),
        (IndexError, lambda held: held.remove(64, 0, [7])),
        (IndexError, lambda held: held.clear(64)),
        (IndexError, lambda held: held.num_copies(64)),
        (IndexError, lambda held: held.drop_plane(1)),
        (IndexError, lambda held: held.held(0, 1, np.zeros(1, np.intp))),
        (OverflowError, lambda held: held.store(-1, 0, [1], 1, True)),
        (OverflowError, lambda held: held.store(0, 0, [1, -1], 1, True)),
        (OverflowError, lambda held: held.store(0, 0, [1, 1 << 64], 1, True)),
        (TypeError, lambda held: held.store(0, 0, [1, "2"], 1, True)),
        (TypeError, lambda held: held.store(0, 0, 7, 1, True)),
        (TypeError, lambda held: held.store(0, 0, [1], 1)),
        (TypeError, lambda held: held.store(0, 0, array("d", [1.0]), 1, True)),
        (TypeError, lambda held: held.store(0, 0, array("q", [1]), 1, True)),
        (TypeError, lambda held: held.slots_of(np.zeros(3, np.uint32))),
        (TypeError, lambda held: held.held(0, 0, np.zeros((1, 1), np.intp))),
        (TypeError, lambda held: held.held(0, 0, np.zeros(2, np.int32))),
        (TypeError, lambda held: held.held(0, 0, [1])),
        (TypeError, lambda _: COMPILED.decode(bytearray(b"1"), None, None, None, None)),
        (TypeError, lambda _: COMPILED.decode(b"1")),
        (TypeError, lambda _: COMPILED.decode(encode([1.5, [REMOVED]]), None, None, None, None)),
    ],
)
def test_wrong_arguments_raise_and_change_nothing(
    error: type[Exception], call: Callable[[Any], object]
) -> None:
    held = _one_plane()
    with pytest.raises(error):
        call(held)
    assert held.num_hashes == 1
    assert held.remove(0, 0, [7]) == (1, 0)


@needs_compiled
def test_a_sequence_that_changes_the_planes_while_it_is_read_is_refused() -> None:
    held = _one_plane()
    held.remove(0, 0, [7])

    class Dropping(list[int]):
        def __iter__(self) -> Iterator[int]:
            held.drop_plane(0)
            return iter([1])

    with pytest.raises(IndexError, match="plane"):
        held.store(0, 0, (one for one in Dropping()), 1, True)
    assert held.num_hashes == 0


@needs_compiled
def test_the_list_of_events_is_whole_while_they_are_made() -> None:
    """Python runs then, and the garbage collector shows it every list."""
    made: list[object] = []
    lengths: list[int] = []

    def stored(*fields: Any) -> object:
        lists = [one for one in gc.get_referrers(*made) if type(one) is list and one is not made]
        lengths.extend(map(len, lists))
        made.append(fields)
        return fields

    payload = encode([1.5, [STORED] * 3])
    assert COMPILED.decode(payload, stored, Removed, Cleared(), msgspec.Raw)[1] == made  # type: ignore[union-attr]
    assert lengths == [1, 2]


@needs_compiled
def test_slots_of_any_stride_are_read() -> None:
    held = _one_plane()
    unaligned = np.frombuffer(b"-" + np.array([0, 1], np.intp).tobytes(), np.intp, offset=1)
    assert np.frombuffer(held.held(0, 0, unaligned), np.uint64).tolist() == [0, 1]
    slots = np.array([0, 1, 99, 1, -1, 0], np.intp)  # 99 and -1 are no slots: nobody holds these
    words = [np.frombuffer(held.held(0, 0, slots[::step]), np.uint64) for step in (1, 2, -1)]
    assert [one.tolist() for one in words] == [[0, 1, 0, 1, 0, 0], [0, 0, 0], [0, 0, 1, 0, 1, 0]]


_WITHOUT_MEMORY = """
import resource
from array import array
from pdconn import __version__
from pdconn.router.prefix.compiled import extension
held = extension.module.HeldBlocks()
held.add_word()
held.add_plane()
lists = [array("Q", range(first, first + 500_000)) for first in range(0, 20_000_000, 500_000)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), hard))
stored = 0
try:
    for hashes in lists:
        assert held.store(0, 0, hashes, 1 << 40, True) == (500_000, 0)
        stored += 500_000
except MemoryError:
    assert held.num_hashes == stored > 0
    assert held.remove(0, 0, hashes[:1000]) == (0, 1000)
    assert held.remove(0, 0, lists[0]) == (500_000, 0)
    assert held.store(0, 0, lists[0], 1 << 40, True) == (500_000, 0)
    print("refused after", stored)
"""


@needs_compiled
def test_a_list_for_which_there_is_no_memory_is_not_stored_in_part() -> None:
    told = subprocess.run(
        [sys.executable, "-c", _WITHOUT_MEMORY], capture_output=True, text=True, check=True
    ).stdout
    assert told.startswith("refused after")


def _resident_nbytes() -> int:
    """Resident memory, without what is free; only glibc can give that back."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


@needs_compiled
def test_blocks_that_are_refused_take_no_memory() -> None:
    held, blocks = _one_plane(), array("Q", range(1_000_000))
    before = _resident_nbytes()
    assert held.store(0, 0, blocks, 10, True) == (10, 999_990 - 1)  # it has one of them
    refused = _resident_nbytes()
    held.store(0, 0, blocks, 1_000_000, True)  # the control
    assert refused - before < (_resident_nbytes() - refused) / 10


@needs_compiled
def test_a_plane_takes_memory_for_the_blocks_that_it_holds() -> None:
    held, blocks = _one_plane(), array("Q", range(2_000_000))
    held.store(0, 0, blocks, 2_000_000, True)
    sizes = [_resident_nbytes()]
    for some in (blocks[:1], blocks):  # the second is the control
        for plane in (held.add_plane() for _ in range(5)):
            held.store(0, plane, some, 2_000_000, True)
        sizes.append(_resident_nbytes())
    # A page may be of 2 MiB.
    assert sizes[1] - sizes[0] < 5 * (4 << 20) < 5 * 8 * len(blocks) <= sizes[2] - sizes[1]


def _seconds_of_copies(residue: Callable[[int], int], planes: int = 54) -> float:
    """Time to copy blocks again, whose planes and slots have these residues by ``_BUCKETS``."""
    held = COMPILED.HeldBlocks()  # type: ignore[union-attr]
    held.add_word()
    blocks = array("Q", range(1, 100_001))
    lists = []
    for plane in range(planes):
        assert held.add_plane() == plane
        if not plane:
            held.store(0, 0, blocks, 1 << 30, True)  # which makes the slot of each block its hash
            assert np.frombuffer(held.slots_of(blocks), np.intp).tolist() == blocks.tolist()
        first = (residue(plane) - (plane << 32)) % _BUCKETS or _BUCKETS
        lists.append(array("Q", range(first, 100_001, _BUCKETS)))
    taken = []
    for _ in range(4):  # first the blocks, then a copy of each
        begin = perf_counter()
        for plane, some in enumerate(lists):
            held.store(0, plane, some, 1 << 30, True)
        taken.append(perf_counter() - begin)
    return min(taken[2:])


_BUCKETS = 2357
"""Of libstdc++'s tables for as many as 2357 elements."""


@needs_compiled
def test_nobody_can_choose_copies_that_share_a_bucket() -> None:
    """Measured with hashes that nobody multiplies: 50 times as long."""
    assert _seconds_of_copies(lambda _: 1) < 15 * _seconds_of_copies(lambda plane: 37 * plane)


_REPEATED = """
import os
from contextlib import suppress
import msgspec
from pdconn.router.prefix.compiled import extension
from pdconn.router.prefix.kv_events import Cleared, Removed, Stored
from tests.router.prefix.test_events import REMOVED, STORED

stored = STORED | {"block_hashes": [*range(500)], "token_ids": [*range(8000)]}
payload = msgspec.msgpack.encode([1.5, [stored, REMOVED], 0])
held = extension.module.HeldBlocks()
held.add_word()
held.add_plane()
blocks, kept = [*range(1000, 1500)], []

def decoded(payload):
    return extension.module.decode(payload, Stored, Removed, Cleared(), msgspec.Raw)

def work():
    decoded(payload), decoded(payload[:-20])
    with suppress(TypeError):
        extension.module.decode(payload, Stored, None, Cleared(), msgspec.Raw)
    held.store(0, 0, blocks, 1000, True)
    held.store(0, 0, blocks, 1000, True)
    with suppress(TypeError):
        held.remove(0, 0, [*blocks, None])
    held.slots_of(blocks), held.leading_slots_of([7, 8]), held.clear(0)
    ids = extension.module.token_ids(b"[" + b"7, " * 5000 + b"7]")
    extension.module.token_ids(b"[" + b"7, " * 5000 + b"]")
    extension.module.hash_blocks(True, bytes(32), ids, 16, False)
    with suppress(TypeError):
        extension.module.hash_blocks(True, bytes(32), [ids], 16, False)

def grown_nbytes(work):
    sizes = []
    for _ in range(2):
        for _ in range(1000):
            work()
        pages = int(open("/proc/self/statm").read().split()[1])
        sizes.append(pages * os.sysconf("SC_PAGESIZE"))
    return sizes[1] - sizes[0]

print(grown_nbytes(work), grown_nbytes(lambda: kept.append(decoded(payload))))
"""


@needs_compiled
def test_nothing_leaks() -> None:
    """In a process of its own: in this one freed memory of other tests would hide a leak."""
    words = [sys.executable, "-c", _REPEATED]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    grown, kept = map(int, told.split())
    assert grown < 1_000_000
    assert kept > 3_000_000  # the control: what is kept is seen


@needs_compiled
@pytest.mark.matrix
def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    """The tests of this folder with the extension built for address and undefined behaviour."""
    sources = Path(extension.__file__).parent
    built = tmp_path / f"_blocks{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-fsanitize=address,undefined",
             "-fno-sanitize-recover=all", f"-I{sysconfig.get_path('include')}"]  # fmt: skip
    subprocess.run(["c++", *flags, sources / "module.cpp", "-o", built], check=True)
    preloaded = " ".join(map(_library, ("libasan.so", "libstdc++.so")))  # exceptions need both
    script = tmp_path / "checked.py"
    script.write_text(_CHECKED.format(built=str(built)), encoding="utf-8")
    environment = os.environ | {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    # The control: a read behind the end is found.
    broken = tmp_path / "broken.cpp"
    broken.write_text(_BROKEN, encoding="utf-8")
    subprocess.run(["c++", *flags[:3], "-fsanitize=address", broken, "-o", tmp_path / "broken"],
                   check=True)  # fmt: skip
    assert subprocess.run([tmp_path / "broken"], capture_output=True, check=False).returncode != 0


def _library(name: str) -> str:
    """The path of a compiler's library."""
    asked = ["c++", f"-print-file-name={name}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


_CHECKED = """
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
name = "pdconn.router.prefix.compiled._blocks"
spec = spec_from_loader(name, ExtensionFileLoader(name, {built!r}))
sys.modules[name] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
import pytest
from pdconn.router.prefix import compiled
compiled._blocks = sys.modules[name]
from pdconn import __version__
from pdconn.router.prefix.compiled import extension
assert extension.module.__file__ == {built!r}
folder = "tests/router/prefix"
chosen = "compiled and not (switched or memory or leaks or sanitizers or worth)"
names = ("compiled", "compiled_prompts", "hashing", "chains", "held_blocks", "events")
files = [f"{{folder}}/test_{{one}}.py" for one in names]
sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", "-k", chosen, *files]))
"""
_BROKEN = """
#include <vector>
int main(int argc, char **) {
    std::vector<int> some(argc);
    volatile int read = *(some.data() + 4 * argc);
    return read * 0;
}
"""
