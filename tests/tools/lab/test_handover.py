"""The handover benchmark judges what it measured, and can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pdconn.tools.bench.serving.lineup import engine_specs
from pdconn.tools.lab.compare_answers import Answer
from pdconn.tools.lab.engine import Engine
from pdconn.tools.lab.lab_client import Timed
from pdconn.tools.lab.quiet import Neighbours, wait_for_quiet
from pdconn.tools.lab.spec import EngineSpec
from tests.throughput.engines.contestants import ALONE, Contestant, Taken, contestants
from tests.throughput.engines.results import Results, verdicts

SECONDS = 20.0
"""For what happens at once, unless the machine has much else to do."""


def _results(ours_s: float, theirs_s: float, alone_s: float) -> Results:
    results = Results()
    for name, seconds in {ALONE: alone_s, "in-tree": theirs_s, "pdconn": ours_s}.items():
        for length in (200, 3000):
            for factor in (0.5, 1.0, 2.0):
                first = seconds * factor
                timed = Timed(Answer((), ()), first, first + 0.07)
                results.add(name, length, Taken(0.1, first, timed))
    return results


def test_medians_and_worst_are_of_the_time_to_the_first_token() -> None:
    results = _results(0.01, 0.4, 0.3)
    assert results.median("pdconn", 200) == 0.01
    assert results.worst("pdconn", 200) == 0.02
    assert "wrong answers: 0" in results.table()


def test_good_numbers_hold_every_ratio() -> None:
    found = verdicts(_results(0.01, 0.4, 0.3), ["in-tree", "pdconn"])
    assert len(found) == 5
    assert all(found)


def test_bad_numbers_fail_the_ratio_that_they_break() -> None:
    slow = verdicts(_results(0.05, 0.4, 0.3), ["in-tree", "pdconn"])
    assert [bool(each) for each in slow] == [False, False, True, False, True]
    assert "FAILS" in str(slow[0])


def test_without_the_in_tree_connector_only_prefill_is_compared() -> None:
    assert len(verdicts(_results(0.01, 0.4, 0.3), ["pdconn"])) == 1


def test_beside_the_tuned_connector_the_worst_is_compared_too() -> None:
    results = _results(0.01, 0.4, 0.3)
    for length in (200, 3000):
        for first in (0.02, 0.03, 0.04):
            timed = Timed(Answer((), ()), first, first + 0.07)
            results.add("in-tree-tuned", length, Taken(0.1, first, timed))
    found = verdicts(results, ["in-tree-tuned", "pdconn"])
    assert [bool(each) for each in found] == [True] * 5
    slower = _results(0.025, 0.4, 0.3)
    slower.first |= {key: s for key, s in results.first.items() if key[0] == "in-tree-tuned"}
    found = verdicts(slower, ["in-tree-tuned", "pdconn"])
    assert [bool(each) for each in found] == [True, False, False, False, False]


def test_everything_measured_is_written_down() -> None:
    results = _results(0.01, 0.4, 0.3)
    document = results.as_json(verdicts(results, ["in-tree", "pdconn"]))
    assert len(document["measured"]) == 6
    assert document["measured"][0]["first_s"] == [0.15, 0.3, 0.6]


def test_each_contestant_gets_its_own_engines_and_cores(tmp_path: Path) -> None:
    names = [ALONE, "in-tree", "pdconn-BHLNC"]
    wanted = engine_specs(names, tmp_path, cores="apart")
    dealt = contestants(names, [Engine(spec, tmp_path) for spec in wanted])
    engines = {one.name: [engine.spec.name for engine in one.engines] for one in dealt}
    assert engines == {
        ALONE: ["alone"],
        "in-tree": ["in-tree-prefill", "in-tree-decode"],
        "pdconn-BHLNC": ["pdconn-BHLNC-prefill", "pdconn-BHLNC-decode"],
    }
    assert [spec.cpus for spec in wanted] == [(0,), (0,), (1,), (0,), (1,)]
    assert wanted[-1].layout == "BHLNC"


def test_an_engine_that_pushes_is_known_by_name_before_it_answers(tmp_path: Path) -> None:
    wanted = engine_specs(["in-tree-push", "in-tree"], tmp_path, cores="apart")
    named = [(spec.kv_transfer_config or {}).get("engine_id") for spec in wanted]
    assert named == ["in-tree-push-prefill", "in-tree-push-decode", None, None]


class _Asked(BaseHTTPRequestHandler):
    """An engine that keeps requests, and answers one token once ``server.ready`` returns."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((time.perf_counter(), body))  # type: ignore[attr-defined]
        self.server.ready()  # type: ignore[attr-defined]
        logprobs = {"token_logprobs": [0.0], "top_logprobs": [{"token_id:7": 0.0}]}
        choice = {"token_ids": [7], "logprobs": logprobs, "finish_reason": "length"}
        answer = json.dumps({"choices": [choice], "kv_transfer_params": None})
        text = f"data: {answer}\n\ndata: [DONE]\n\n" if body.get("stream") else answer
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        self.server.answered.set()  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def _engine(spec: EngineSpec) -> Iterator[tuple[Engine, Any]]:
    with ThreadingHTTPServer((spec.host, spec.port), _Asked) as server:
        server.ready, server.asked = lambda: None, []  # type: ignore[attr-defined]
        server.answered = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Engine(spec, Path()), server
        finally:
            server.shutdown()
            thread.join()


def test_a_pushing_pair_is_asked_for_both_legs_at_once(tmp_path: Path) -> None:
    specs = engine_specs(["in-tree-push"], tmp_path, cores="apart")
    with _engine(specs[0]) as (first, prefill), _engine(specs[1]) as (second, decode):
        asked = threading.Event()

        def after_prefill() -> None:
            asked.set()
            assert prefill.answered.wait(SECONDS)
            time.sleep(0.2)

        prefill.ready = lambda: asked.wait(SECONDS)  # in vain, if decode comes after its answer
        decode.ready = after_prefill
        taken = Contestant("in-tree-push", (first, second)).answer([5, 6, 7])
    assert taken.prefill_s < SECONDS, "decode was asked before prefill had answered"
    [(_, to_prefill)], [(_, to_decode)] = prefill.asked, decode.asked
    assert to_prefill["request_id"] == to_decode["request_id"]
    assert to_prefill["kv_transfer_params"]["do_remote_decode"] is True
    params = to_decode["kv_transfer_params"]
    assert (params["do_remote_prefill"], params["remote_engine_id"], params["remote_port"]) == (
        True, "in-tree-push-prefill", specs[0].side_channel_port,
    )  # fmt: skip
    # From prefill's answer to decode's token, while decode's own time began when both were asked.
    assert 0.0 < taken.first_s < taken.timed.first_token_s


def test_a_pulling_pair_is_asked_one_leg_after_the_other(tmp_path: Path) -> None:
    """Negative control."""
    specs = engine_specs(["in-tree"], tmp_path, cores="apart")
    with _engine(specs[0]) as (first, prefill), _engine(specs[1]) as (second, decode):
        prefill.ready = lambda: time.sleep(0.2)
        taken = Contestant("in-tree", (first, second)).answer([5, 6, 7])
    assert decode.asked[0][0] >= prefill.asked[0][0] + 0.2
    assert taken.first_s == taken.timed.first_token_s


def test_only_what_others_burn_counts_against_a_turn() -> None:
    burn = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(burn, stdout=subprocess.PIPE) as burning:
        assert burning.stdout is not None
        burning.stdout.readline()
        unaware, aware = Neighbours([]), Neighbours([burning.pid])
        began, before_s = time.monotonic(), _processor_s(burning.pid)
        try:
            while (burnt_s := _processor_s(burning.pid) - before_s) < 0.5:
                assert time.monotonic() - began < 60.0, f"it burnt {burnt_s} s only"
                time.sleep(0.05)
            shares = unaware.share(), aware.share()
        finally:
            burning.kill()
    available_s = (time.monotonic() - began) * (os.cpu_count() or 1)
    # Whatever else runs here counts in both.
    assert 0.0 < shares[0] <= 1.1
    assert (shares[0] - shares[1]) * available_s > burnt_s / 2


def _processor_s(pid: int) -> float:
    user, system = (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
    )
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_a_machine_that_never_calms_down_is_given_up_on() -> None:
    assert wait_for_quiet(most=2.0, timeout_s=5.0)
    assert not wait_for_quiet(most=-1.0, timeout_s=0.6)
