"""Forms: what passes, what never does, and that the engine's parser reads the same names."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdconn.router.openai.forms import MAX_PARTS, check_form
from pdconn.router.router_errors import BadBody

MULTIPART = "multipart/form-data; boundary=B"
MODEL = 'Content-Disposition: form-data; name="model"'
FILE = 'Content-Disposition: form-data; name="file"; filename="a.wav"'
BAD = 'Content-Disposition: form-data; name="vllm_xargs"'


def part(head: str, value: str = "{}") -> bytes:
    return f"--B\r\n{head}\r\n\r\n{value}\r\n--B--\r\n".encode()


@pytest.mark.parametrize(
    "head",
    [
        'Content-Disposition: form-data; name="vllm_xargs"',
        'content-disposition: form-data; name="kv_transfer_params"',
        "Content-Disposition: form-data; name=vllm_xargs",
        'Content-Disposition: form-data; name="vllm\\_xargs"',
        "Content-Disposition: form-data; name*=utf-8''vllm%5Fxargs",
        'Content-Disposition: form-data;\r\n name="vllm_xargs"',
        'Content-Disposition: form-data; filename="a"; name="vllm_xargs"',
        'Content-Disposition: form-data; name="model"; name="vllm_xargs"',
        'X: 1\r\nCONTENT-DISPOSITION: form-data; name="vllm_xargs"',
    ],
)
def test_a_form_cannot_name_memory_however_it_is_written(head: str) -> None:
    with pytest.raises(BadBody):
        check_form(MULTIPART, part(head))


@pytest.mark.parametrize(
    "head",
    [
        'Content-Disposition: form-data; name="model"',
        'content-disposition: form-data; name="timestamp_granularities[]"',
        'Content-Disposition: form-data; name="file"; filename="a b"\r\nContent-Type: audio/wav',
        'Content-Disposition: form-data; name="file"; filename="a"; filename*=utf-8\'\'%C3%A9.wav',
    ],
)
def test_forms_as_clients_write_them_pass(head: str) -> None:
    """The control of the test above."""
    check_form(MULTIPART, part(head))


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded"])
def test_what_is_no_form_is_refused(content_type: str) -> None:
    with pytest.raises(BadBody, match="Content-Type: expected multipart/form-data"):
        check_form(content_type, b"vllm_xargs=1")


@pytest.mark.parametrize("written", ["charset=punycode; boundary=B", "boundary=B; charset=utf-16"])
def test_a_form_cannot_name_memory_in_another_charset(written: str) -> None:
    """The engine's parser would read names in it: ``vllm_xargs-`` is ``vllm_xargs`` in punycode."""
    body = part('Content-Disposition: form-data; name="vllm_xargs-"')
    with pytest.raises(BadBody, match="in UTF-8"):
        check_form(f"multipart/form-data; {written}", body)


@pytest.mark.parametrize(
    "written",
    ["boundary=B", 'boundary="B"', "charset=UTF-8; boundary=B", 'boundary=B;charset="utf-8"'],
)
def test_content_types_as_clients_write_them_pass(written: str) -> None:
    """The control of the test above."""
    check_form(f"multipart/form-data; {written}", part(MODEL))


@pytest.mark.parametrize(
    "value",
    [
        f"\r\n{BAD}\r\n\r\n{{}}\r\n",
        'RIFFcontent-disposition: form-data; name="vllm_xargs"',
        "Content-Disposition: folded\r\n oddly",
        "\r\n\r\n",
        "",
        "\r",
        "\n-B",
    ],
)
def test_a_file_may_hold_any_bytes_but_its_boundary(value: str) -> None:
    two = part(FILE, value).removesuffix(b"--B--\r\n") + part(MODEL, "whisper")
    assert check_form(MULTIPART, two) == "whisper"
    assert names_read_by_the_engine(MULTIPART, two) in (None, ["file", "model"])


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (b"", "begins with its boundary"),
        (b"\r\n" + part(MODEL), "begins with its boundary"),
        (b"preamble\r\n" + part(MODEL), "begins with its boundary"),
        (part(MODEL).replace(b"--B--\r\n", b""), "no last line"),
        (part(MODEL) + b"\r\n" + part(BAD), "nowhere else"),
        (part(MODEL, f"x\n--B\r\n{BAD}\r\n\r\n{{}}"), "nowhere else"),
        (part(MODEL, f"--B\r\n{BAD}\r\n\r\n{{}}"), "nowhere else"),
        (part(MODEL, f"x\r\n--B \r\n{BAD}\r\n\r\n{{}}"), "nowhere else"),
        (part(MODEL, f"x\r\n--B\n{BAD}\r\n\r\n{{}}"), "nowhere else"),
        (part(f"X: --B\r\n{MODEL}"), "nowhere else"),
        (part(f"{MODEL}\r\n{BAD}"), "2 of them"),
        (part("Content-Type: text/plain"), "0 of them"),
        (part(f"X: 1\n{BAD}\r\n{MODEL}"), "a plain name"),
        (part(f"{MODEL}\r\nX: 1\r{BAD}"), "a plain name"),
        (part(f"{MODEL}\r\n {BAD}"), "a plain name"),
        (part(f"{MODEL}\r\nContent-Disposition : form-data"), "a plain name"),
        (part(f"X: {'x' * 9000}\r\n{MODEL}"), "a plain name"),
    ],
)
def test_what_two_parsers_could_read_in_two_ways_is_refused(body: bytes, seen: str) -> None:
    with pytest.raises(BadBody, match=seen):
        check_form(MULTIPART, body)


@pytest.mark.parametrize(
    "boundary", ["<B>", "B'", '"<B>"', '"B "', '"\\B"', "B; x=1", "B; boundary=C", "=?utf-8?q?B?="]
)
def test_a_boundary_that_parsers_could_read_in_two_ways_is_refused(boundary: str) -> None:
    with pytest.raises(BadBody, match="Content-Type"):
        check_form(f"multipart/form-data; boundary={boundary}", part(MODEL))


def test_the_last_part_named_model_counts_as_it_does_at_the_engine() -> None:
    two = part(MODEL, "first").removesuffix(b"--B--\r\n") + part(MODEL, "last")
    assert check_form(MULTIPART, two) == "last"
    assert check_form(MULTIPART, part(FILE)) is None
    assert check_form(MULTIPART, b"--B--\r\n") is None


def test_parts_are_counted() -> None:
    some = b"".join(part(FILE).removesuffix(b"--B--\r\n") for _ in range(MAX_PARTS - 1))
    check_form(MULTIPART, some + part(MODEL))
    with pytest.raises(BadBody, match=f"at most {MAX_PARTS} parts"):
        check_form(MULTIPART, some + some + part(MODEL))


def test_a_large_file_of_near_boundaries_passes() -> None:
    file = random.Random(0).randbytes(1 << 20) + b"\r\n--" * 100_000
    long = "x" * 32
    body = part(FILE, "VALUE").replace(b"VALUE", file).replace(b"--B", b"--" + long.encode())
    check_form(f"multipart/form-data; boundary={long}", body)


# The engine's own parser


def names_read_by_the_engine(content_type: str, body: bytes) -> list[str] | None:
    """As vLLM's server reads a form; None where it refuses it or is not installed."""
    formparsers = pytest.importorskip("starlette.formparsers")
    datastructures = pytest.importorskip("starlette.datastructures")
    pytest.importorskip("python_multipart")

    async def stream() -> AsyncIterator[bytes]:
        yield body

    async def read() -> list[str] | None:
        headers = datastructures.Headers({"Content-Type": content_type})
        try:
            form = await formparsers.MultiPartParser(headers, stream()).parse()
        except formparsers.MultiPartException:
            return None
        names = [name for name, _ in form.multi_items()]
        await form.close()
        return names

    return asyncio.run(read())


PIECES = st.sampled_from(
    [
        *(b"--B", b"--B--", b"\r\n", b"\r", b"\n", b" ", b"\0", b"--", b":", b";", b"x", b'"'),
        *(MODEL.encode(), FILE.encode(), BAD.encode(), b"X: 1", b"\r\n--B\r\n", b"\r\n\r\n"),
        *(
            b'Content-Disposition: form-data; name="',
            b'vllm_xargs"',
            b"; filename*=",
            b"=?utf-8?q?",
        ),
    ]
)
TYPES = st.sampled_from([MULTIPART, 'multipart/form-data; boundary="B"; charset=utf-8'])


@settings(max_examples=400, deadline=None)
@example(MULTIPART, [part(MODEL, f"\r\n{BAD}\r\n")], [])
@given(TYPES, st.lists(PIECES, max_size=14), st.lists(PIECES, max_size=6))
def test_no_accepted_form_holds_a_forbidden_name_for_the_engine(
    content_type: str, pieces: list[bytes], value: list[bytes]
) -> None:
    """Drawn around a form that passes, so that many do."""
    body = b"".join(pieces)
    bodies = [body, part(FILE, "@").replace(b"@", b"".join(value)) + body]
    bodies.append(part(MODEL).removesuffix(b"--B--\r\n") + body + b"\r\n--B--\r\n")
    for one in bodies:
        try:
            check_form(content_type, one)
        except BadBody:
            continue
        assert "vllm_xargs" not in (names_read_by_the_engine(content_type, one) or [])


def test_the_engine_reads_the_forbidden_name_where_nothing_is_checked() -> None:
    """The control of the test above: a lone CR LF at the start is no obstacle to it."""
    assert names_read_by_the_engine(MULTIPART, b"\r\n" + part(BAD)) == ["vllm_xargs"]
