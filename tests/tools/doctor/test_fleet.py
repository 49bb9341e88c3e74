"""What engines say of themselves, judged: clocks, versions, counters, pull times, hashes."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pdconn.router.fleet.member import Role, parse_member
from pdconn.router.prefix.hashing import HashScheme, chain, external
from pdconn.tools.cli.main import main
from pdconn.tools.doctor import examine
from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.fleet.channels import PairFacts, PullTimes, judge_pairs, judge_times
from pdconn.tools.doctor.fleet.engines import (
    EngineFacts,
    client_session,
    drift_of,
    judge_agreement,
    judge_engines,
    read_engines,
    trusting,
)
from pdconn.tools.doctor.fleet.event_endpoints import EventFacts, judge_events, read_events
from pdconn.tools.doctor.fleet.golden import MOST_PAIRS, golden_ids, golden_pairs, golden_prompt
from pdconn.tools.doctor.fleet.traffic import judge_traffic, traffic_of
from pdconn.tools.doctor.probe import ProbeFacts
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.openai.served_models import ServedModel
from tests.fakes.credentials import Authority
from tests.fakes.event_loop import in_loop
from tests.router.events.publisher import Publisher, two_ports
from tests.tools.doctor.healthy import healthy, ids

MODELS = (ServedModel("m", 4096),)
PREFILL = EngineFacts("http://p:1", frozenset({"prefill"}), version="0.32.0", models=MODELS)
DECODE = EngineFacts("http://d:1", frozenset({"decode"}), version="0.32.0", models=MODELS)


def agreement(*engines: EngineFacts) -> list[str]:
    return [finding.id for finding in judge_agreement(engines)]


def test_engines_that_agree_have_no_finding() -> None:
    assert agreement(PREFILL, DECODE) == []
    assert agreement(PREFILL, replace(DECODE, drift_s=4.0)) == []
    assert agreement(PREFILL, replace(DECODE, version=None)) == []
    down = EngineFacts("http://d:2", frozenset({"decode"}), "refused")
    assert agreement(PREFILL, DECODE, down) == []  # said once, by the check of each


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"version": "0.33.0"}, "fleet.versions"),
        ({"drift_s": -40.0}, "engine.clock"),
        ({"models": (ServedModel("m", 2048),)}, "fleet.max-model-len"),
        ({"models": (*MODELS, ServedModel("n", 4096))}, "fleet.model"),
    ],
)
def test_engines_that_differ_are_found(changed: dict[str, Any], found: str) -> None:
    assert agreement(PREFILL, replace(DECODE, **changed)) == [found]


def test_an_engine_that_asks_for_a_key_is_told_apart_from_one_that_is_down() -> None:
    found = list(judge_engines([replace(PREFILL, refused=401)]))
    assert [one.id for one in found] == ["engine.models"]
    assert "--api-key-file" in found[0].remedy


@in_loop
async def test_engines_at_https_are_asked_with_the_ca_that_was_given(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    files = ours.sign("engine", "127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    app = web.Application()

    async def answer(http: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    app.router.add_get("/{page:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
    member = parse_member("--decode", f"https://127.0.0.1:{port}", {Role.DECODE})
    found = []
    for ca in (ours.file, theirs.file, None):
        trusted = None if ca is None else trusting("--engine-ca", ca)
        async with client_session(2.0, None, trusted) as session:
            [facts] = await read_engines([member], session)
            found.append([one.id for one in judge_engines([facts])])
            if facts.error is not None:
                [finding] = judge_engines([facts])
                assert "--engine-ca FILE" in finding.remedy
    await runner.cleanup()
    assert found == [[], ["engine.unreachable"], ["engine.unreachable"]]


@pytest.mark.parametrize(("content", "expected"), [(None, "a file to read"), ("x", "PEM")])
def test_a_bad_ca_file_names_the_option(content: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(BadQuestion, match=f"--engine-ca: expected .*{expected}"):
        trusting("--engine-ca", str(path))


def test_a_clock_is_wrong_only_if_no_moment_of_the_exchange_fits() -> None:
    date = "Thu, 01 Jan 1970 00:01:00 GMT"  # the second from 60 to 61
    assert drift_of(date, 60.2, 60.4) == 0.0
    assert drift_of(date, 55.0, 60.0) == 0.0  # a slow answer
    assert drift_of(date, 60.9, 61.5) == 0.0
    assert drift_of(date, 50.0, 50.0) == 10.0
    assert drift_of(date, 70.0, 70.0) == -9.0  # at least
    assert drift_of("yesterday", 0.0, 0.0) is None
    assert drift_of(None, 0.0, 0.0) is None


# --- counters -----------------------------------------------------------------------------


def page(**values: float) -> str:
    names = {
        "pulls": "pdconn:pulls_total",
        "failed": "vllm:nixl_num_failed_transfers_total",
        "nbytes": "vllm:nixl_bytes_transferred_sum",
        "runs": "vllm:nixl_num_descriptors_sum",
        "lent": "pdconn:leases_granted_total",
        "expired": "vllm:nixl_num_kv_expired_reqs_total",
        "quarantined": "pdconn:pulls_quarantined_total",
        "unauthenticated": "pdconn:pulls_unauthenticated_total",
    }
    return "".join(f'{names[key]}{{engine="0"}} {value}\n' for key, value in values.items())


def traffic(lender: str, reader: str) -> list[tuple[str, str]]:
    both = replace(PREFILL, metrics=lender), replace(DECODE, metrics=reader)
    return [(finding.id, finding.severity) for finding in judge_traffic(both)]


def test_counters_are_summed_over_ranks_and_nonsense_is_left_out() -> None:
    text = page(pulls=3) + page(pulls=4, failed=1) + "pdconn:pulls_total{broken\n# HELP x\n"
    found = traffic_of(text)
    assert (found.known, found.pulls, found.failed, found.run_nbytes) == (True, 7, 1, None)
    assert not traffic_of("vllm:num_requests_running 3\n").known


def test_traffic_without_failures_has_no_finding() -> None:
    good = page(pulls=100, nbytes=100 << 30, runs=1000)
    assert traffic(page(lent=100, expired=2), good) == []
    assert traffic(page(lent=0), page(pulls=0)) == []


@pytest.mark.parametrize(
    ("lender", "reader", "found"),
    [
        (page(lent=9), page(pulls=8, failed=1), ("traffic.failed", "warning")),
        (page(lent=9), page(pulls=1, failed=8), ("traffic.failed", "fault")),
        (page(lent=9), page(pulls=0), ("traffic.no-pulls", "fault")),
        (page(lent=9, expired=3), page(pulls=6), ("traffic.expired", "warning")),
        (page(lent=9), page(pulls=9, quarantined=1), ("traffic.quarantined", "warning")),
        (
            page(lent=9),
            page(pulls=9, nbytes=9 << 26, runs=9 << 16),
            ("traffic.small-runs", "warning"),
        ),
        (page(lent=9), "up 1\n", ("traffic.no-connector", "warning")),
        (page(pulls=55), page(pulls=55), ("traffic.role", "fault")),
        (page(lent=9), page(lent=55), ("traffic.role", "fault")),
    ],
)
def test_counters_that_tell_of_trouble_are_found(
    lender: str, reader: str, found: tuple[str, str]
) -> None:
    assert found in traffic(lender, reader)
    beside = "no-connector" in found[0] or "leases" in reader  # and decode has tried no pull
    assert len(traffic(lender, reader)) == 1 + beside


def test_prefill_and_decode_swapped_is_not_healthy() -> None:
    found = traffic(page(pulls=55, lent=0), page(lent=55, pulls=0))
    assert found == [("traffic.role", "fault")] * 2
    both = page(lent=55, pulls=55)  # the control: second turns pull from decode
    assert traffic(both, both) == []
    assert traffic(page(pulls=4), page(lent=4)) == []  # too few to judge


def test_the_reasons_of_failures_are_named() -> None:
    reader = replace(DECODE, metrics=page(pulls=0, failed=9, unauthenticated=9))
    (found,) = judge_traffic([reader])
    assert "9 failed to authenticate" in found.message


# --- pull times ---------------------------------------------------------------------------

PAIR = PairFacts("p:1", "d:1", (), 1 << 20, 1 << 20, token_nbytes=1e5)
TIMES = PullTimes(100_000, 10e9, lease_s=30.0, read_timeout_s=120.0)  # 10 GB in 1 s


def times(**changed: float) -> list[str]:
    return [finding.id for finding in judge_times([PAIR], replace(TIMES, **changed))]  # type: ignore[arg-type]


def test_the_longest_pull_must_fit_the_read_timeout_and_should_fit_the_lease_twice() -> None:
    assert times() == []
    assert times(bytes_per_s=0.5e9) == ["pair.lease"]  # 20 s
    assert times(bytes_per_s=0.5e9, lease_s=41.0) == []
    assert times(bytes_per_s=0.05e9) == ["pair.read-timeout"]  # 200 s


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (ProbeFacts("h:1", 1, 1e3, 1e3), ["pair.read-timeout", "probe.link"]),
        (ProbeFacts("h:1", 1, 20e9, 20e9), []),
        (ProbeFacts("h:1", error="refused"), ["probe.failed"]),
    ],
)
def test_the_speed_of_a_probe_takes_the_place_of_the_links(
    facts: ProbeFacts,
    found: list[str],
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A probe that failed leaves the link's, by which the pull is fast enough."""
    monkeypatch.setattr(examine, "read_probe", lambda host, port, say: facts)

    @in_loop
    async def asked() -> None:
        async with healthy(tmp_path) as pair:
            pair.more = ["--probe", "127.0.0.1:9", "--link", "100Gb/s"]
            _, document = await pair.ask(capsys)
        assert sorted(ids(document)) == found
        messages = [one["message"] for one in document["findings"] if one["id"].startswith("pair")]
        assert all("at the measured 1e-06 GB/s" in message for message in messages)

    asked()


def test_small_runs_are_found_where_a_block_is_large_enough_for_larger_ones() -> None:
    small = replace(PAIR, run_nbytes=4096)
    assert [one.id for one in judge_pairs([small])] == ["pair.small-runs"]
    assert list(judge_pairs([replace(small, block_nbytes=8192)])) == []  # of a tiny model
    assert list(judge_pairs([PAIR])) == []


# --- events -------------------------------------------------------------------------------


def test_different_hashes_are_found_and_unknown_ones_told() -> None:
    cbor = EventFacts("a", 0, scheme=HashScheme("sha256_cbor", 16), has_stored=True)
    pickled = replace(cbor, engine="b", scheme=HashScheme("sha256", 16))
    coarser = replace(cbor, engine="b", scheme=HashScheme("sha256_cbor", 64))
    unknown = EventFacts("c", 0, has_stored=True)
    fresh = EventFacts("d", 0)
    silent = EventFacts("e", 0, silent=True)
    assert [one.id for one in judge_events([cbor, coarser, fresh])] == []
    assert [one.id for one in judge_events([cbor, pickled])] == ["events.hash"]
    assert [one.id for one in judge_events([cbor, unknown])] == ["events.hash-unknown"]
    assert [one.id for one in judge_events([silent])] == ["events.replay"]


@in_loop
async def test_the_hash_of_an_engine_is_read_from_what_it_replays() -> None:
    for scheme, seed, expected in (
        (HashScheme("sha256_cbor", 16), None, "sha256_cbor"),
        (HashScheme("xxhash_cbor", 16, "7"), "7", "xxhash_cbor"),
        (HashScheme("xxhash_cbor", 16, "7"), None, None),  # the control: no seed, no root
    ):
        ports = two_ports()
        publisher = Publisher(ports)
        try:
            at = "tcp://127.0.0.1:"
            word = f"http://127.0.0.1:1,events={at}{ports[0]},replay={at}{ports[1]}"
            member = parse_member("--prefill", word, {Role.PREFILL})
            (before,) = await read_events([member], seed, 5.0)
            assert (before.scheme, before.has_stored, before.closed) == (None, False, ())
            tokens = list(range(64))
            await publisher.publish(
                {
                    "type": "BlockStored",
                    "block_hashes": [external(full) for full in chain(scheme, tokens)],
                    "parent_block_hash": None,
                    "token_ids": tokens,
                    "block_size": 16,
                    "medium": "GPU",
                }
            )
            (after,) = await read_events([member], seed, 5.0)
            assert after.has_stored
            assert (after.scheme and after.scheme.algorithm) == expected
        finally:
            await publisher.die()


# --- golden -------------------------------------------------------------------------------


def test_a_large_fleet_meets_every_engine_and_a_small_one_every_pair() -> None:
    def fleet(num_prefill: int, num_decode: int) -> list[EngineFacts]:
        prefill = [replace(PREFILL, url=f"http://p{n}:1") for n in range(num_prefill)]
        return prefill + [replace(DECODE, url=f"http://d{n}:1") for n in range(num_decode)]

    assert len(golden_pairs(fleet(2, 3))) == 6
    large = golden_pairs(fleet(3, 30))
    assert len(large) == 30 > MOST_PAIRS
    assert len({prefill.url for prefill, _ in large}) == 3
    assert len({decode.url for _, decode in large}) == 30
    assert golden_pairs(fleet(2, 0)) == []


def test_golden_prompts_differ_from_their_beginning_and_fit_the_model() -> None:
    assert golden_prompt("a")[0] != golden_prompt("b")[0]
    assert len(golden_prompt("a", 512)) < 512 < len(golden_prompt("a"))
    assert golden_ids("a") != golden_ids("b")
    assert golden_ids("a") == golden_ids("a")
    assert len(golden_ids("a", 128)) <= 64


@in_loop
async def test_a_near_tie_is_a_warning_and_another_token_a_fault(
    tmp_path: Path, capsys: Any
) -> None:
    async with healthy(tmp_path) as pair:
        pair.decode.wrong = True
        pair.prefill.gap = 0.01
        code, document = await pair.ask(capsys)
        assert (code, ids(document)) == (0, ["golden.near-tie"])
        pair.prefill.gap = 1.0
        code, document = await pair.ask(capsys)
        assert (code, ids(document)) == (1, ["golden.tokens"])


@in_loop
async def test_a_decode_engine_that_counts_no_pulls_cannot_be_told(
    tmp_path: Path, capsys: Any
) -> None:
    async with healthy(tmp_path) as pair:
        pair.decode.has_connector = False
        pair.decode.count()
        code, document = await pair.ask(capsys)
        assert (code, sorted(ids(document))) == (0, ["golden.uncounted", "traffic.no-connector"])


def test_nothing_is_said_of_engines_that_do_not_answer(capsys: Any) -> None:
    """ "ok traffic" was, and "ssl:default" of an engine without TLS."""
    gone = [f"http://127.0.0.1:{port}" for port in free_ports(2)]
    assert main(["doctor", "--no-local", "--prefill", gone[0], "--decode", gone[1]]) == 1
    said = capsys.readouterr().out
    assert f"engine.unreachable: {gone[0]}: Connection refused" in said
    assert "skipped  traffic   no engine answers" in said
    assert "ssl" not in said


@in_loop
async def test_a_prompt_may_take_longer_than_a_page(tmp_path: Path, capsys: Any) -> None:
    async with healthy(tmp_path) as pair:
        pair.decode.admission_s = 2.5  # the pages' time-out is 2 s
        code, document = await pair.ask(capsys)
        assert (code, ids(document)) == (0, [])
        pair.decode.admission_s, pair.decode.metrics_pause_s = 0.0, 2.5
        code, document = await pair.ask(capsys)
        assert (code, ids(document)) == (1, ["engine.unreachable"])  # the control


@in_loop
async def test_an_engine_without_tokenizer_is_sent_ids(tmp_path: Path, capsys: Any) -> None:
    async with healthy(tmp_path) as pair:
        pair.prefill.takes_text = pair.decode.takes_text = False
        code, document = await pair.ask(capsys)
        assert (code, document["findings"]) == (0, [])
        assert isinstance(pair.decode.seen[-1].body["prompt"], list)


@in_loop
async def test_the_key_of_the_engines_is_sent(tmp_path: Path, capsys: Any) -> None:
    key = tmp_path / "key"
    key.write_text("k-123\n", encoding="utf-8")
    async with healthy(tmp_path) as pair:
        pair.prefill.key = pair.decode.key = "k-123"
        code, document = await pair.ask(capsys)
        assert (code, ids(document)) == (1, ["golden.failed"])
        pair.more = ["--api-key-file", str(key)]
        code, document = await pair.ask(capsys)
        assert (code, ids(document)) == (0, [])
