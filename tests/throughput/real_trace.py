"""Conversations over one real prefill and one real decode engine, policy by policy.

    python -m tests.throughput.real_trace --json real_trace.json

Real vLLM on this machine, real NIXL, and ``pdconn proxy``.  Every conversation begins with
a shared system prompt and grows turn by turn; each policy gets the same trace with other
tokens, so that no policy finds the cache of another.  Cached tokens are those of the
engines' own counters.  Every answer is compared with that of one engine alone.

``--stores off on`` asks the same trace again of engines that share a store; ``--num-blocks`` few
enough make their own caches forget, as those of busy engines do.

With one engine per role the only choice is whether to hand over: a turn whose prefix decode
has cached needs no prefill.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pdconn.tools.lab.compare_answers import compare
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.lab_client import Client, Timed
from pdconn.tools.lab.model import write_model
from pdconn.tools.lab.ports import LOCALHOST, free_ports
from pdconn.tools.lab.proxy import admin_url, running_proxy
from pdconn.tools.lab.spec import EngineSpec
from pdconn.tools.output.table import table

BLOCK = 32
VOCABULARY = 1990
ANSWER_TOKENS = 24
LONGEST = 2000


@dataclass(frozen=True)
class Row:
    """One policy's trace."""

    policy: str
    store: str
    requests: int
    prompt_tokens: int
    alone: int
    prefill_computed: int
    decode_computed: int
    cached_share: float
    ttft_ms: float
    ttft_p95_ms: float
    wrong: int


def conversations(count: int, turns: int, shift: int) -> Iterator[list[int]]:
    """Prompts in the order they are asked: each turn of all conversations in turn.

    What an engine would answer is replaced by drawn tokens, so that every policy is asked
    the same, but for a ``shift`` of every token.
    """
    rng = random.Random(7)

    def words(num_tokens: int) -> list[int]:
        return [10 + (rng.randrange(VOCABULARY) + shift) % VOCABULARY for _ in range(num_tokens)]

    systems = [words(400) for _ in range(2)]
    histories = [[*rng.choice(systems), *words(rng.randint(20, 80))] for _ in range(count)]
    for _ in range(turns):
        for history in histories:
            yield history[:LONGEST]
            history.extend(words(ANSWER_TOKENS + rng.randint(10, 120)))


@contextmanager
def engines(
    directory: Path, num_blocks: int, store: str
) -> Iterator[tuple[Engine, Engine, Engine, list[str]]]:
    """Alone, prefill and decode, and the words that name the last two to a router."""
    model = write_model(directory)
    ports = free_ports(8)
    members = []

    def spec(name: str, port: int, role: str | None, events: int, replay: int) -> EngineSpec:
        publishing = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
        transfer: dict[str, object] = {
            "kv_connector": "PdconnConnector",
            "kv_connector_module_path": "pdconn.vllm",
            "kv_role": role,
        }
        if store == "on":
            kept = {"root": str(directory / "root"), "capacity": "8GiB", "min_tokens": 128}
            transfer["kv_connector_extra_config"] = {"store": kept | {"block_tokens": 128}}
        extra = ("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(publishing))
        members.append(
            f"http://{LOCALHOST}:{port},events=tcp://{{host}}:{events},replay=tcp://{{host}}:{replay}"
        )
        return EngineSpec(
            name=name,
            model=model,
            port=port,
            side_channel_port=ports[7] if role == "kv_producer" else None,
            kv_transfer_config=transfer if role else None,
            one_process=True,
            prefix_caching=role is not None,
            num_blocks=num_blocks if role else None,
            block_tokens=BLOCK,
            max_model_len=LONGEST + ANSWER_TOKENS + BLOCK,
            args=extra if role else (),
        )

    specs = [
        spec("alone", ports[0], None, 1, 2),
        spec("prefill", ports[1], "kv_producer", ports[2], ports[3]),
        spec("decode", ports[4], "kv_consumer", ports[5], ports[6]),
    ]
    with running(specs, directory, cache=directory / "cache") as (alone, prefill, decode):
        yield alone, prefill, decode, members[1:]


def run(
    policy: str,
    store: str,
    prompts: Sequence[list[int]],
    fleet: tuple[Engine, Engine, Engine, list[str]],
) -> Row:
    """Ask a trace through the router, then the engine alone."""
    alone, prefill, decode, members = fleet
    before = [_counts(engine) for engine in (prefill, decode)]
    answers: list[Timed] = []
    directory = prefill.log.parent
    with running_proxy([members[0]], [members[1]], directory, args=("--policy", policy)) as url:
        client = Client(url)
        for number, prompt in enumerate(prompts):
            answers.append(client.stream(prompt, ANSWER_TOKENS))
            _say(f"{policy}, store {store}: {number + 1} of {len(prompts)}")
            time.sleep(0.05)
        name = 'pdconn_router_direct_requests_total{reason="prefix_held"}'
        held = _labelled(Client(admin_url(url)).get_text("/metrics"), name)
    computed = []
    for engine, was in zip((prefill, decode), before, strict=True):
        now = _counts(engine)
        computed.append(int(now[0] - was[0] - (now[1] - was[1])))
    total = sum(map(len, prompts))
    firsts = sorted(answer.first_token_s * 1000 for answer in answers)
    single = Client(alone.url)
    wrong = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        wrong += compare(single.complete(prompt, ANSWER_TOKENS, top=1), answer.answer) is not None
    return Row(
        policy,
        store,
        len(prompts),
        total,
        int(held),
        computed[0],
        computed[1],
        1 - sum(computed) / total,
        statistics.median(firsts),
        firsts[int(len(firsts) * 0.95)],
        wrong,
    )


def _counts(engine: Engine) -> tuple[float, float]:
    """Tokens looked up in the prefix cache, and found there or at the other engine."""
    metrics = Client(engine.url).metrics()
    found = metrics.get("vllm:prefix_cache_hits_total", 0.0)
    found += metrics.get("vllm:external_prefix_cache_hits_total", 0.0)
    return metrics.get("vllm:prefix_cache_queries_total", 0.0), found


def _labelled(page: str, name: str) -> float:
    return next(
        (float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), 0.0
    )


def _say(text: str) -> None:
    print(f"\r{text}   ", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; 1 when any answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--policies", nargs="+", default=["round-robin", "prefix"])
    parser.add_argument("--stores", nargs="+", choices=["off", "on"], default=["off"])
    parser.add_argument("--num-blocks", type=int, default=600, help="of each engine")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(argv)
    rows = []
    for store in args.stores:
        with (
            tempfile.TemporaryDirectory() as directory,
            engines(Path(directory), args.num_blocks, store) as fleet,
        ):
            for number, policy in enumerate(args.policies):
                prompts = list(conversations(args.conversations, args.turns, number))
                rows.append(run(policy, store, prompts, fleet))
    print(file=sys.stderr)
    print(
        table(
            [
                "policy",
                "store",
                "requests",
                "prompt\ntokens",
                "by decode\nalone",
                "computed by\nprefill",
                "computed by\ndecode",
                "cached\nshare",
                "TTFT ms\nmedian",
                "TTFT ms\np95",
                "wrong",
            ],
            [
                [
                    row.policy,
                    row.store,
                    str(row.requests),
                    str(row.prompt_tokens),
                    str(row.alone),
                    str(row.prefill_computed),
                    str(row.decode_computed),
                    f"{row.cached_share:.3f}",
                    f"{row.ttft_ms:.0f}",
                    f"{row.ttft_p95_ms:.0f}",
                    str(row.wrong),
                ]
                for row in rows
            ],
        )
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
