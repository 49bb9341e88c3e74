"""The access log: a line for each request, also for one that succeeded; as text and as JSON."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress

import pytest
from aiohttp import web

from pdconn.router.access.access_log import KeyValues
from pdconn.tools.cli.proxy.proxy_logs import JsonFormatter
from tests.fakes.deployment import deployment, leave
from tests.fakes.event_loop import in_loop, until
from tests.fakes.fake_engine import ANSWER, MODEL, stream_of

PDCONN = [sys.executable, "-m", "pdconn.tools.cli.main"]


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, logger="pdconn.access")

    def found() -> list[dict[str, str]]:
        texts = [r.getMessage() for r in caplog.records if r.name == "pdconn.access"]
        assert all(text.startswith("pdconn: request ") and "\n" not in text for text in texts)
        return [dict(re.findall(r"(\w+)=('[^']*'|\S+)", text)) for text in texts]

    return found


def info_lines(caplog) -> list[str]:
    return [
        r.getMessage()
        for r in caplog.records
        if r.name == "pdconn.access" and r.levelno >= logging.INFO
    ]


def test_a_request_that_succeeded_leaves_a_line(lines):
    """Without it nothing in the log says that a request came at all."""

    @in_loop
    async def scene():
        async with deployment() as d:
            done = await d.complete()
            [line] = lines()
            assert line["request"] == done.headers["X-Request-Id"]
            assert (line["method"], line["path"]) == ("POST", "/v1/completions")
            assert (line["status"], line["outcome"]) == ("200", "ok")
            assert (line["prefill"], line["decode"]) == (d.prefill[0].url, d.decode[0].url)
            assert line["client"] == "127.0.0.1"
            parts = float(line["ticket_seconds"]) + float(line["first_byte_seconds"])
            assert 0 < parts < float(line["seconds"])

    scene()


USAGE = {"prompt_tokens": 3000, "completion_tokens": 1}


def prompt_tokens(lines, answer=None, route="/v1/completions", **body) -> str:
    """``prompt_tokens`` of a request's line; ``answer``: of decode, in place of its own."""

    @in_loop
    async def scene():
        async def script(engine, seen, http):
            return web.json_response(answer)

        async with deployment() as d:
            d.prefill[0].usage = body.pop("prefills", None)
            if answer is not None:
                d.decode[0].script = script
            assert (await d.complete(route, **body)).status == 200

    scene()
    return lines()[-1]["prompt_tokens"]


@pytest.mark.parametrize(
    ("ids", "counted"), [([7] * 100, "100"), ([], "0"), ([[1, 2], [3]], "3"), ([1000000], "1")]
)
def test_token_ids_are_counted(lines, ids, counted):
    """100 ids were "97"."""
    assert prompt_tokens(lines, prompt=ids) == counted


def test_a_guess_is_marked_as_one(lines):
    assert prompt_tokens(lines, prompt="a" * 400) == "~100"
    assert prompt_tokens(lines, prompt=["a" * 400, "b"]).startswith("~")
    assert prompt_tokens(lines, route="/v1/chat/completions").startswith("~")


def test_what_prefill_has_counted_is_no_guess(lines):
    assert prompt_tokens(lines, prompt="a" * 400, prefills=USAGE) == "3000"
    of_anthropic = {"input_tokens": 20, "cache_read_input_tokens": 80}
    assert prompt_tokens(lines, route="/v1/messages", prefills=of_anthropic) == "100"


@pytest.mark.parametrize("stream", [False, True])
def test_what_decode_has_counted_alone_is_no_guess(lines, stream):
    counted = {"choices": [], "usage": USAGE}
    if not stream:
        assert prompt_tokens(lines, counted, prompt="a" * 400, n=2) == "3000"
        return

    @in_loop
    async def scene():
        async with deployment() as d:
            d.decode[0].script = stream_of({"choices": [{"text": "t"}]}, counted)
            assert (await d.complete(n=2, stream=True)).status == 200
            state = json.loads((await d.send("/debug/state", method="GET")).body)
            assert [(one["num_tokens"], one["is_guess"]) for one in state["decisions"]] == [
                (3000, False)
            ]

    scene()
    assert lines()[0]["prompt_tokens"] == "3000"


def test_requests_that_fail_leave_one_too(lines):
    @in_loop
    async def scene():
        async with deployment(require_prefill=True) as d:
            refused = await d.send("/v1/completions", b"{")
            assert lines()[-1]["status"] == "400"
            assert lines()[-1]["outcome"] == "refused"
            assert refused.headers["X-Request-Id"] == lines()[-1]["request"]
            await d.send("/nowhere", method="GET")
            assert (lines()[-1]["path"], lines()[-1]["status"]) == ("/nowhere", "404")
            d.decode[0].admitting.clear()
            writer = await d.open()
            await until(lambda: d.decode[0].seen)
            await leave(writer)
            await until(lambda: len(lines()) == 3)
            assert (lines()[-1]["status"], lines()[-1]["outcome"]) == ("-", "client_left")
            d.decode[0].admitting.set()
            await d.prefill[0].stop()
            assert (await d.complete()).status == 503
            assert (lines()[-1]["status"], lines()[-1]["outcome"]) == ("503", "no_engine")

    scene()


@pytest.mark.parametrize("expectation", ["bogus", "100-continue"])
def test_a_request_with_an_expectation_is_served_and_leaves_one_too(lines, expectation):
    """Expectations that are not known are ignored (RFC 9110, section 10.1.1)."""

    @in_loop
    async def scene():
        async with deployment() as d:
            head = {"Expect": expectation}
            body = {"model": MODEL, "prompt": "hi"}
            async with d.client.post(d.url("/v1/completions"), json=body, headers=head) as reply:
                assert (reply.status, await reply.read()) == (200, ANSWER)
            [line] = lines()
            assert (line["status"], line["outcome"]) == ("200", "ok")

    scene()


def test_probes_are_for_debugging(lines, caplog):
    """Orchestrators ask every few seconds."""

    @in_loop
    async def scene():
        async with deployment() as d:
            for path in ("/livez", "/readyz", d.proxy.url + "/health"):
                assert (await d.send(path, method="GET")).status == 200
            assert len(lines()) == 3
            assert info_lines(caplog) == []
            await d.send("/v1/models", method="GET")
            assert len(info_lines(caplog)) == 1

    scene()


def test_no_client_writes_a_line_or_a_field_of_its_own(lines):
    """``%0A`` in a path, quotes and spaces in an id would else make lines of a forged log."""

    @in_loop
    async def scene():
        async with deployment() as d:
            await d.send("/x%0Apdconn:%20request%20status=200%20outcome=ok", method="GET")
            headers = {"X-Request-Id": "a status=200 outcome=forged '"}
            body = {"model": "m", "prompt": "hi"}
            async with d.client.post(d.url("/v1/completions"), json=body, headers=headers) as reply:
                assert reply.status == 200
            await d.send("/" + "x" * 5000, method="GET")
            [path, odd, long] = lines()
            assert (path["status"], odd["outcome"]) == ("404", "ok")
            assert len(long["path"]) < 250

    scene()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, "-"),
        (200, "200"),
        (0.25, "0.25"),
        ("/v1/x", "/v1/x"),
        ("", "''"),
        ("a b", "'a b'"),
        ("a=b", "'a=b'"),
        ("a\nb", r"'a\nb'"),
        ("\u200b", r"'\u200b'"),
        ("'", '"\'"'),
    ],
)
def test_values_that_are_not_plain_are_quoted(value, written):
    assert str(KeyValues({"key": value})) == f"key={written}"


# JSON


def formatted(record: logging.LogRecord) -> dict[str, object]:
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line: dict[str, object] = json.loads(text)
    return line


def test_a_json_line_has_the_fields_of_a_request_apart():
    fields = {"status": 200, "path": "/a b", "prefill": None}
    record = logging.LogRecord(
        "pdconn.access", logging.INFO, "f", 1, "pdconn: request %s", (KeyValues(fields),), None
    )
    line = formatted(record)
    assert {name: line[name] for name in fields} == fields
    assert (line["level"], line["logger"]) == ("info", "pdconn.access")
    assert line["message"] == "pdconn: request status=200 path='/a b' prefill=-"


def test_a_traceback_is_one_field():
    try:
        int("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "it\nfailed", None, sys.exc_info())
    line = formatted(record)
    assert str(line["exception"]).startswith("Traceback")
    assert "\n" in str(line["exception"])
    assert line["message"] == "it\nfailed"


WORDS = ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1", "--port", "0"]


def output_of(*more: str) -> tuple[list[str], list[str]]:
    """What a proxy that refused one request has printed: events, and the log."""
    command = [*PDCONN, "proxy", *WORDS, *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", first.partition("on ")[2] or first)
        url = json.loads(first)["url"] if first.startswith("{") else (found and found[0])
        body = json.dumps({"prompt": "x"}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body)
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=30)
        process.terminate()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    return [first, *out.splitlines()], err.splitlines()


def test_json_leaves_no_line_plain():
    """A program that reads the output met sentences between its objects."""
    events, log = output_of("--json")
    assert [json.loads(line)["event"] for line in events] == ["listening", "draining"]
    read = [json.loads(line) for line in log]
    assert {one["status"] for one in read if one["logger"] == "pdconn.access"} == {503}
    assert any("engine down" in one["message"] for one in read)


def test_events_and_log_have_formats_of_their_own():
    events, log = output_of("--json", "--log-format", "text")
    assert json.loads(events[0])["event"] == "listening"
    assert any("pdconn: request method=POST" in line for line in log)
    events, log = output_of("--log-format", "json")
    assert events[0].startswith("pdconn proxy on ")
    assert all(json.loads(line)["message"] for line in log)


def test_why_it_does_not_start_is_json_too():
    done = subprocess.run(
        [*PDCONN, "proxy", *WORDS, "--json", "--wait", "0.1"], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "engines not ready" in json.loads(done.stderr.splitlines()[-1])["message"]
