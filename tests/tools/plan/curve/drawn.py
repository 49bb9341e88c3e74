"""Traces that are drawn: conversations over a few system prompts, and models of small rows."""

from __future__ import annotations

import random
from collections.abc import Iterator

from pdconn.store.format.prompt_rows import Spacing
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.hf.config_json import model_shape
from pdconn.tools.plan.model_shape import LayerSort, ModelShape
from pdconn.tools.plan.store.cost import StoredShapes
from pdconn.tools.plan.store.curve import TracedRequest
from pdconn.tools.plan.store.simulated_store import SimulatedSettings
from registration.references import AttentionKind

BLOCK = 32
"""Tokens of a block of drawn traces: finer than a row."""


def conversations(
    seed: int,
    num_requests: int,
    *,
    turn: int = 300,
    at_once: int = 25,
    answer: int = 0,
    spoken: int = 8,
) -> Iterator[TracedRequest]:
    """Requests of conversations that begin with one of four system prompts, and grow by turns.

    Args:
        turn: tokens of a turn, at most.
        at_once: conversations that are open; a new one ends another.
        spoken: how many conversations lie between two turns of one, in the mean.
        answer: tokens of an answer, at most, which are a part of the next turn.
    """
    rng = random.Random(seed)
    fresh = iter(range(1000, 1 << 40))
    open_ones: list[tuple[list[int], int, int]] = []
    at_s = 0.0
    for _ in range(num_requests):
        at_s += rng.expovariate(1 / 5)
        if open_ones and rng.random() < 0.7:
            # Those that spoke lately speak again, most of the time.
            at = max(0, len(open_ones) - 1 - int(rng.expovariate(1 / spoken)))
            ids, tokens, said = open_ones.pop(at)
            tokens += said + rng.randrange(1, turn)
        else:
            system = 100 * rng.randrange(4)
            ids = [system + block for block in range(4)]
            tokens = len(ids) * BLOCK + rng.randrange(1, 2 * turn)
        ids = ids[: tokens // BLOCK]
        ids += [next(fresh) for _ in range(tokens // BLOCK - len(ids))]
        said = rng.randrange(1, answer + 1) if answer else 0
        whole = ids + [next(fresh) for _ in range((tokens + said) // BLOCK - len(ids))]
        known = whole if answer else [*ids, next(fresh)]
        yield TracedRequest(tokens, said, known, BLOCK, at_s)
        open_ones.append((whole, tokens, said))
        if len(open_ones) > at_once:
            open_ones.pop(rng.randrange(len(open_ones) // 2))


def branches(seed: int, num_requests: int = 60) -> Iterator[TracedRequest]:
    """Prompts that part from one of the last twelve at any block of it."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 30))
    prompts: list[list[int]] = []
    for number in range(num_requests):
        before = rng.choice(prompts[-12:]) if prompts and rng.random() < 0.75 else []
        ids = before[: rng.randrange(len(before) + 1)]
        tokens = len(ids) * BLOCK + rng.randrange(1, 400)
        ids = ids + [next(fresh) for _ in range(-(-tokens // BLOCK) - len(ids))]
        prompts.append(ids)
        yield TracedRequest(tokens, 0, ids, BLOCK, at_s=100.0 * number)


def _attention(layers: tuple[int, ...], window: int | None = None) -> LayerSort:
    kind = AttentionKind.FULL if window is None else AttentionKind.SLIDING_WINDOW
    return LayerSort(layers, kind, window, heads=1, row_nbytes=64)


FULL = EngineShape(ModelShape("full", (_attention((0, 1)),)))
WINDOWS = EngineShape(ModelShape("windows", (_attention((0,)), _attention((1, 2), 150))))
STATES = EngineShape(
    model_shape(
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "layer_types": ["attention", "mamba", "attention"],
            "mamba_d_conv": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 4,
            "torch_dtype": "bfloat16",
        },
        "states",
    )
)
ENGINES = {"full": FULL, "windows": WINDOWS, "states": STATES}
ROW_TOKENS = 64
PASS_TOKENS = 256


def settings_of(
    engine: EngineShape, *, window_every: int | str = "auto", saves_answers: bool = False
) -> SimulatedSettings:
    """What an engine with small rows saves and loads."""
    block = engine.attention_block_tokens if engine.model.states else ROW_TOKENS
    rows = StoredShapes.of_engine(engine, block)
    return SimulatedSettings(
        rows.layout,
        Spacing.from_setting(rows.layout, window_every),
        rows.staged,
        staging=1 << 30,
        min_tokens=1,
        pass_tokens=PASS_TOKENS,
        saves_answers=saves_answers,
    )
