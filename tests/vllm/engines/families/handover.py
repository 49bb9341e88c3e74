"""A hand-over of a family's model, against one engine alone.

The engine alone generates one token more, and what is handed over is the prompt with the first
of them: both sides then compute that token in a step of its own, from the KV and states of the
prompt.  So kernels that compute a prompt and a step differently make no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdconn.tools.lab.compare_answers import TOLERANCE, Answer, Mismatch, compare, make_prompts
from pdconn.tools.lab.lab_client import (
    Client,
    ask_both,
    lend_prefix,
    prefill_only,
    prefill_then_decode,
)
from pdconn.tools.lab.ports import free_ports
from pdconn.tools.lab.spec import EngineSpec
from tests.forked.engines import running
from tests.vllm.engines.engines import KV_CACHE_MIB, LEASE_S, cache_beside, transfer_config
from tests.vllm.engines.families.models import Family

MAX_MODEL_LEN = 2048
NUM_TOKENS = 8
COARSE = 0.02
"""Nats between right answers of a model in bfloat16, or of kernels that round by batch, asked one
after another.  Asked at once, one LFM2 alone is 0.04 from itself and one MLA model 0.9."""

STEPS = ("--max-num-batched-tokens", "256", "--max-num-seqs", "64")
"""Arguments of a prefill engine that computes longer prompts in several steps."""
FOLLOWED_LENGTHS = (1980, 1500, 300, 31)
"""Of prompts that decode follows; it asks for blocks of the first at once, and reads it early."""

Prompt = tuple[int, ...]


def engine(
    name: str,
    family: Family,
    model: Path,
    role: str | None,
    *,
    ranks: int = 1,
    prefix_caching: bool = False,
    connector: str | None = None,
    layout: str = "LBHNC",
    max_model_len: int = MAX_MODEL_LEN,
    args: tuple[str, ...] = (),
    **extra: Any,
) -> EngineSpec:
    """One engine; ``connector`` is a class of :mod:`tests.vllm.engines.families.controls`."""
    port, side = free_ports(2)
    transfer = None
    if role is not None:
        lease = {} if role == "kv_consumer" else {"kv_lease_duration": LEASE_S}
        transfer = transfer_config(role, policy="fail", **{"verify": "always", **lease, **extra})
        if connector is not None:
            transfer["kv_connector"] = connector
            transfer["kv_connector_module_path"] = "tests.vllm.engines.families.controls"
    return EngineSpec(
        name=name,
        model=model,
        port=port,
        side_channel_port=None if role in (None, "kv_consumer") else side,
        kv_transfer_config=transfer,
        layout=layout,
        prefix_caching=prefix_caching,
        tensor_parallel=ranks,
        one_process=ranks == 1,
        kv_cache_mib=KV_CACHE_MIB,
        max_model_len=max_model_len,
        block_tokens=family.block_tokens,
        args=("--dtype", family.dtype, *family.args, *args),
        env={"PDCONN_CPU_STATES": "1", "VLLM_SERVER_DEV_MODE": "1"},
    )


_AHEAD_S = 0.1
_OF_STREAMS = ("pulls_followed_total", "early_bytes_total")


class Handover:
    """Engines of one model, by name; ``alone`` has no connector."""

    def __init__(self, family: Family, clients: dict[str, Client]) -> None:
        self.family, self.clients = family, clients
        self._expected: dict[Prompt, tuple[Prompt, Answer]] = {}

    def expected(self, prompt: Prompt) -> tuple[Prompt, Answer]:
        """What to hand over, and the right answer to it; each prompt is asked once."""
        if prompt not in self._expected:
            whole = self.clients["alone"].complete(prompt, NUM_TOKENS + 1)
            rest = Answer(whole.tokens[1:], whole.logprobs[1:], whole.top[1:])
            self._expected[prompt] = (*prompt, whole.tokens[0]), rest
        return self._expected[prompt]

    def mismatches(
        self,
        prompts: Sequence[Prompt],
        prefill: str = "prefill",
        decode: str = "decode",
        like: Mapping[str, Any] | None = None,
    ) -> list[tuple[int, Mismatch]]:
        """How answers after a hand-over differ, by the prompt's tokens.

        Args:
            like: an earlier ticket of ``prefill``: decode follows it, the first prompt from its
                first step on.
        """
        sides = self.clients[prefill], self.clients[decode]
        tolerance = COARSE if self.family.dtype == "bfloat16" else TOLERANCE
        found = []
        for number, prompt in enumerate(prompts):
            longer, want = self.expected(prompt)
            if like is None:
                seen = prefill_then_decode(*sides, longer, NUM_TOKENS)
            else:
                ahead_s = 0.0 if number else _AHEAD_S
                seen, _ = ask_both(*sides, longer, NUM_TOKENS, like=like, head_start_s=-ahead_s)
            if (difference := compare(want, seen, tolerance)) is not None:
                found.append((len(longer), difference))
        return found

    def like(self, prefill: str = "prefill", decode: str = "decode") -> Mapping[str, Any]:
        """A ticket of ``prefill``, which says where it lends; used up."""
        prompt = tuple(range(50, 120))
        ticket = prefill_only(self.clients[prefill], prompt)
        assert ticket is not None
        self.clients[decode].complete(prompt, 1, kv_transfer_params=ticket)
        return ticket

    def follow(
        self,
        seed: int,
        prefill: str = "prefill",
        decode: str = "decode",
        *,
        ranks: int = 1,
        in_steps: bool = True,
    ) -> None:
        """Decode follows prompts that nobody has seen: each pull of its ranks, and answers rightly.

        Args:
            in_steps: whether prefill computes the longest in several steps: some is read early.
        """
        like = self.like(prefill, decode)
        followed, early = (self.metric(name, decode) for name in _OF_STREAMS)
        prompts = make_prompts(FOLLOWED_LENGTHS, seed)
        assert self.mismatches(prompts, prefill, decode, like) == []
        now_followed, now_early = (self.metric(name, decode) for name in _OF_STREAMS)
        assert now_followed - followed == ranks * len(prompts)
        assert (now_early > early) is in_steps

    def wrong(
        self,
        prompts: Sequence[Prompt],
        seen: Sequence[Answer],
        undisturbed: Sequence[Answer] = (),
    ) -> list[str]:
        """Those of ``seen`` that are no right answers to what was handed over for ``prompts``.

        Some were computed by decode, whose pull had failed.  ``undisturbed``
        are answers to the same before any fault, for a family that drifts.
        """
        found = []
        tolerance = COARSE if self.family.coarse else TOLERANCE
        for number, (prompt, answer) in enumerate(zip(prompts, seen, strict=True)):
            longer, want = self.expected(prompt)
            difference = compare(want, answer, tolerance)
            if difference is not None and self.family.coarse:
                right = [self.clients["alone"].complete(longer, NUM_TOKENS)]
                right += undisturbed[number : number + 1]
                if any(compare(each, answer, tolerance) is None for each in right):
                    continue
            if difference is not None:
                found.append(f"{len(longer)} tokens: {difference}")
        return found

    def metric(self, name: str, engine: str = "decode") -> float:
        """A counter of ours."""
        return self.clients[engine].metrics().get(f"pdconn:{name}", 0.0)


@contextmanager
def handing_over(
    family: Family,
    work: Path,
    specs: Sequence[EngineSpec],
    model: Path,
    *,
    prefix_caching: bool = False,
) -> Iterator[Handover]:
    """Run ``specs`` and an engine alone.

    With ``prefix_caching`` that has one as well: vLLM then computes the prompt of a hybrid in
    pieces, which end where a state is kept, and coarse kernels tell.
    """
    longest = max(spec.max_model_len for spec in specs)
    alone = engine(
        "alone", family, model, None, prefix_caching=prefix_caching, max_model_len=longest
    )
    with running([alone, *specs], work, cache=cache_beside(model)) as started:
        yield Handover(family, {each.spec.name: Client(each.url) for each in started})


def boundaries(*sizes: int) -> list[int]:
    """Lengths of prompts around multiples of blocks, windows and chunks; and others.

    A token more is handed over, so those just below an edge begin two below it.
    """
    edges = {size + step for size in sizes for step in (-2, -1, 0, 1)}
    return sorted({1, 2, 5, 300, 1500, *edges} - {0})


def lend_most(holder: Client, prompt: Prompt) -> tuple[Mapping[str, Any], int]:
    """A ticket for as much of the prompt as the engine holds, and how much that is."""
    wanted = len(prompt) - 2
    told = lend_prefix(holder, prompt, wanted)
    assert told is not None
    held = told["pdconn"].get("held", wanted)
    if held < wanted:
        assert told == {"pdconn": {"lend": wanted, "held": held}}
        told = lend_prefix(holder, prompt, held)
        assert told is not None
    assert told["remote_num_tokens"] == held
    return told, held
