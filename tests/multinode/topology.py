"""Two prefill and two decode engines and the router, each a machine of its own.

    client ── router ──┬── p1, p2    prefill; side channel at 5600
                       ├── d1, d2    decode; their cables can be late, see ``wire``
    client ── alone    └──           no connector: says what is right

Every machine has its own address and its own 8000.  KV travels over ``eth0`` by TCP: UCX is
given no other way, since processes on one kernel could copy each other's memory however
their networks are kept apart.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pdconn.tools.lab.compare_answers import Answer, compare, make_prompts
from pdconn.tools.lab.engine import Engine, running
from pdconn.tools.lab.lab_client import Client, prefill_then_decode
from pdconn.tools.lab.proxy import admin_url, running_proxy
from pdconn.tools.lab.spec import EngineSpec
from tests.multinode.namespaces import Machine, Network
from tests.vllm.engines.engines import cache_beside, transfer_config

Prompt = tuple[int, ...]

ADDRESSES = {"client": 2, "alone": 3, "router": 10, "p1": 11, "p2": 12, "d1": 21, "d2": 22}
PREFILL, DECODE = ("p1", "p2"), ("d1", "d2")
MAX_MODEL_LEN = 2048
MAX_TOKENS = 6
BLOCK = 32
LEASE_S = 6.0
CLAIM_TIMEOUT_S = 3.0
DRAIN_TIMEOUT_S = 1.0
START_TIMEOUT_S = 600.0
"""Five engines at once are 100 s of imports on two cores that have nothing else to do."""
PATIENCE_S = 90.0
"""How long anything may take that has to come about."""

_HTTP, _SIDE_CHANNEL = 8000, 5600
_RETRIES = 4
"""How often the router's kernel retransmits what is not acknowledged: about 6 s."""
_ROUTER = (
    *("--policy", "round-robin", "--connect-timeout", "1"),
    "--require-prefill",  # else decode would hide that prefill is not reached
)


class WrongAnswer(Exception):
    """An answer differs from that of one engine alone; says where."""


class NeverCame(Exception):
    """What was waited for did not come about; says what."""


@dataclass
class Cluster:
    """The machines, what runs on them, and the right answers.

    Requests are sent from inside ``network["client"]``.
    """

    network: Network
    engines: Mapping[str, Engine]
    router: Client
    pages: Client
    directory: Path
    _right: dict[tuple[Prompt, int], Answer] = field(default_factory=dict)

    def client(self, name: str) -> Client:
        """To one engine, by its machine's name."""
        return Client(self.engines[name].url)

    def log(self, name: str) -> str:
        """Everything that an engine has logged."""
        return self.engines[name].log.read_text(encoding="utf-8")

    def count(self, name: str, metric: str) -> float:
        """A metric of an engine, summed over its labels; 0 if it is not there."""
        return self.client(name).metrics().get(metric, 0.0)

    def learn(self, prompts: Sequence[Prompt], num_tokens: int = MAX_TOKENS) -> None:
        """Find out what one engine alone answers."""
        new = [prompt for prompt in prompts if (prompt, num_tokens) not in self._right]
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda p: self.client("alone").complete(p, num_tokens), new)
            self._right |= {(p, num_tokens): a for p, a in zip(new, answers, strict=True)}

    def wrong(self, prompt: Prompt, seen: Answer) -> str | None:
        """How ``seen`` differs from what one engine alone answers, or None."""
        num_tokens = len(seen.tokens)
        self.learn([prompt], num_tokens)
        difference = compare(self._right[prompt, num_tokens], seen)
        return None if difference is None else f"{len(prompt)} tokens: {difference}"

    def check(self, prompt: Prompt, seen: Answer) -> None:
        """Raise ``WrongAnswer`` unless ``seen`` is what one engine alone answers."""
        if (problem := self.wrong(prompt, seen)) is not None:
            raise WrongAnswer(problem)

    def hands_over(self, prefill: str, decode: str, prompt: Prompt) -> bool:
        """Whether ``decode`` pulls ``prompt`` from ``prefill``; its answer is checked."""
        before = self.count(decode, "pdconn:pulls_total")
        seen = prefill_then_decode(self.client(prefill), self.client(decode), prompt, MAX_TOKENS)
        self.check(prompt, seen)
        return self.count(decode, "pdconn:pulls_total") - before == 1.0

    def await_free(self, *names: str) -> None:
        """Until all blocks of these engines are free.

        An engine tells this only when it steps, so it is given a request to step for.

        Raises:
            NeverCame: some stay in use.
        """
        for name in names:
            until(partial(self._is_free, name), f"all blocks of {name} are free")

    def _is_free(self, name: str) -> bool:
        return self.used(name) == 0.0

    def used(self, name: str) -> float:
        """Share of an engine's blocks in use, lent ones among them, after one more request."""
        self.client(name).complete((5, 6, 7), 1)
        return self.count(name, "vllm:kv_cache_usage_perc")

    def lent(self, name: str) -> float:
        """Prompts that a prefill engine has lent; updated when it steps, as blocks are."""
        self.client(name).complete((5, 6, 7), 1)
        return self.count(name, "pdconn:leases_granted_total")

    def up(self, engine: str) -> bool:
        """Whether the router believes that an engine is up."""
        line = f'engine="{self.engines[engine].url}"'
        page = self.pages.get_text("/metrics").splitlines()
        [up] = [each for each in page if "engine_up{" in each and line in each]
        return up.endswith(" 1.0")

    def routed(self, metric: str) -> float:
        """A metric of the router, summed over its labels."""
        return self.pages.metrics().get(metric, 0.0)


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until ``true`` says so.

    Raises:
        NeverCame: it did not, for ``PATIENCE_S``.
    """
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > give_up:
            raise NeverCame(f"{what}: not within {PATIENCE_S:.0f} s")
        time.sleep(0.1)


def fresh_prompts(lengths: Sequence[int], seed: int) -> list[Prompt]:
    """Prompts of these lengths in tokens, none of which begins like another."""
    return make_prompts(lengths, seed=seed)


@contextmanager
def cluster(model: Path, directory: Path) -> Iterator[Cluster]:
    """Build the network, start everything, and hand it over inside the client's machine.

    Raises:
        NetworkFailed, EngineDied, EngineStartTimeout: nothing is left running then.
    """
    with Network(ADDRESSES, late=DECODE) as network, network["client"].inside():
        specs = engine_specs(network, model)
        cache = cache_beside(model)
        with running(specs, directory, cache=cache, timeout_s=START_TIMEOUT_S) as engines:
            by_name = {engine.spec.name: engine for engine in engines}
            with _router(network["router"], by_name, directory) as url:
                yield Cluster(network, by_name, Client(url), Client(admin_url(url)), directory)


@contextmanager
def _router(machine: Machine, engines: Mapping[str, Engine], directory: Path) -> Iterator[str]:
    # What a dead link swallows is given up after seconds, not after the kernel's 15 minutes.
    machine.set("ipv4/tcp_retries2", _RETRIES)
    prefill, decode = ([engines[name].url for name in names] for names in (PREFILL, DECODE))
    with running_proxy(
        prefill, decode, directory, _HTTP, _ROUTER, host=machine.address, within=machine.within
    ) as url:
        yield url


def engine_specs(network: Network, model: Path) -> list[EngineSpec]:
    """The four engines, and the one alone."""
    secret = _secret_beside(model)
    lending = {"kv_lease_duration": LEASE_S, "secret_file": secret}
    pulling = {
        "claim_timeout": CLAIM_TIMEOUT_S,
        "drain_timeout": DRAIN_TIMEOUT_S,
        "secret_file": secret,
    }
    transfers = {
        **dict.fromkeys(PREFILL, transfer_config("kv_producer", policy="recompute", **lending)),
        **dict.fromkeys(DECODE, transfer_config("kv_consumer", policy="recompute", **pulling)),
        "alone": None,
    }
    return [_spec(network[name], model, transfer) for name, transfer in transfers.items()]


def _spec(machine: Machine, model: Path, transfer: Mapping[str, object] | None) -> EngineSpec:
    return EngineSpec(
        name=machine.name,
        model=model,
        host=machine.address,
        port=_HTTP,
        side_channel_port=_SIDE_CHANNEL if machine.name in PREFILL else None,
        kv_transfer_config=transfer,
        layout=None if transfer is None else "BHLNC",
        one_process=True,
        max_model_len=MAX_MODEL_LEN,
        block_tokens=BLOCK,
        env={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0", "VLLM_HOST_IP": machine.address},
        within=machine.within,
    )


def _secret_beside(model: Path) -> str:
    """A file with a secret that all engines of a model share."""
    path = model.with_suffix(".multinode-secret")
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32), encoding="utf-8")
    return str(path)
