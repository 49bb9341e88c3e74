"""Put any router between two real vLLM engines, and compare its answers with one engine alone.

    python -m tests.contracts.behind -- vllm-router --port {port} --vllm-pd-disaggregation \\
        --prefill {prefill} --decode {decode}

``{prefill}``, ``{decode}`` (base URLs), their ``{prefill_port}`` and ``{decode_port}``, ``{model}``
and ``{port}`` are filled in.  Engines have the demo's tiny hybrid model on CPUs.  Every answer must
be that of the prefill engine alone, and every prompt must have been pulled by decode.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pdconn.tools.lab.demo_run import DemoPlan, demo_specs
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.model import write_model
from pdconn.tools.lab.ports import free_ports

WORDS = ("one", "two", "three", "prefill", "decode", "window", "block")
START_S = 120.0
_PULLS = "pdconn:pulls_total"


def main(words: list[str]) -> int:
    """0 if every answer agrees and every prompt was pulled."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--directory", type=Path, default=Path(".work/behind"))
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--setup", default="", help="shell command, once the router listens")
    parser.add_argument("command", nargs="+", help="the router's, after --")
    args = parser.parse_args(words)
    args.directory.mkdir(parents=True, exist_ok=True)
    plan = DemoPlan(
        model=write_model(args.directory),
        directory=args.directory,
        vocab=0,
        device="cpu",
        layout="BHLNC",
        max_tokens=8,
        max_model_len=2048,
        tolerance=0.0,
        port=None,
        args=(),
        decode_extra_config={},
    )
    with running(demo_specs(plan)[:2], args.directory) as (prefill, decode):
        return _compare(args, prefill, decode)


def _compare(args: argparse.Namespace, prefill: Engine, decode: Engine) -> int:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    model = json.loads(_get(f"{prefill.url}/v1/models"))["data"][0]["id"]
    filled = {
        "prefill": prefill.url,
        "decode": decode.url,
        "prefill_port": str(prefill.spec.port),
        "decode_port": str(decode.spec.port),
        "port": str(port),
        "model": model,
    }
    command = [word.format(**filled) for word in args.command]
    with (args.directory / "router.log").open("wb") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(url, router)
        if args.setup:
            subprocess.run(args.setup.format(**filled), shell=True, check=True)
        return _ask(args, url, prefill, decode, model)
    finally:
        os.killpg(router.pid, 15)
        router.wait(30)


def _ask(args: argparse.Namespace, url: str, prefill: Engine, decode: Engine, model: str) -> int:
    rng = random.Random(5)
    before, num_same = _metric(decode, _PULLS), 0
    for number in range(args.prompts):
        prompt = " ".join(rng.choice(WORDS) for _ in range(40 + 11 * number))
        body = {"model": model, "max_tokens": 8, "temperature": 0, "logprobs": 1, "prompt": prompt}
        through, alone = (_post(at + args.path, body) for at in (url, prefill.url))
        num_same += _said(through) == _said(alone)
    pulls = _metric(decode, _PULLS) - before
    print(f"{args.prompts} prompts: {num_same} answered as by one engine alone, {pulls:.0f} pulled")
    return 0 if num_same == pulls == args.prompts else 1


def _said(answer: dict[str, Any]) -> Any:
    [choice] = answer["choices"]
    return choice["text"], choice["logprobs"]["tokens"]


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()  # type: ignore[no-any-return]


def _metric(engine: Engine, name: str) -> float:
    page = _get(f"{engine.url}/metrics").decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


def _wait(url: str, router: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        if router.poll() is not None:
            raise SystemExit(f"the router ended with {router.returncode}, see its log")
        try:
            _get(f"{url}/health")
        except urllib.error.HTTPError:
            return  # it listens, and knows no such path
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise SystemExit(f"nothing listens at {url} after {START_S:.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
