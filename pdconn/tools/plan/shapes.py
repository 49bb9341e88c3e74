"""Built-in model shapes, from the models' published ``config.json``.

All have 16-bit keys and values, vLLM's default.
"""

from __future__ import annotations

import difflib
import re

from pdconn.tools.plan.model_shape import LayerSort, ModelShape, sorts_of
from pdconn.tools.plan.plan_errors import ShapeError
from registration.references import AttentionKind

_FULL, _WINDOW = AttentionKind.FULL, AttentionKind.SLIDING_WINDOW


def _uniform(name: str, *, layers: int, heads: int, head_dim: int) -> ModelShape:
    """Full attention in every layer."""
    return ModelShape(name, sorts_of([_FULL] * layers, None, heads, 4 * head_dim))


def _every(
    nth: int, window: int, name: str, *, layers: int, heads: int, head_dim: int
) -> ModelShape:
    """Full attention in every ``nth`` layer, a sliding window in the others."""
    kinds = [_WINDOW if (layer + 1) % nth else _FULL for layer in range(layers)]
    return ModelShape(name, sorts_of(kinds, window, heads, 4 * head_dim))


def _mla(name: str, *, layers: int, latent: int, rope: int) -> ModelShape:
    """One 16-bit latent per token and layer, instead of heads."""
    every = tuple(range(layers))
    return ModelShape(
        name, (LayerSort(every, _FULL, None, 1, 2 * (latent + rope), is_latent=True),)
    )


def _state(
    layers: tuple[int, ...], window: int, ratio: int, nbytes: int, *, block_tokens: int, part: str
) -> LayerSort:
    """The rows that compressors of ``ratio`` keep of the tokens in their window."""
    return LayerSort(
        layers, _WINDOW, window, 1, nbytes, 1, block_tokens, part, compress_ratio=ratio
    )


def _deepseek_v4(name: str) -> ModelShape:
    """DeepSeek-V4-Flash as vLLM caches it with ``fp8_ds_mla``, in five groups.

    Of 43 layers, 0 and 1 have a window only; after them, even layers also have a history
    compressed 4 to 1 with an indexer, and odd layers one compressed 128 to 1.  Each
    compressor keeps the rows of tokens that are not compressed yet: one float32 row per
    token, within a window of its own.

    Assumed from vLLM's ``models/deepseek_v4``: 584 bytes a latent row (448 fp8 + 64
    bf16 + 8 of scales), 132 an indexer row (128 fp8 + a float32 scale), keys and scores
    of 512 (indexer: 128) float32 in the states, twice as many at ratio 4, whose windows
    overlap.  Pages are not padded to 576 bytes here: padding never moves.  The draft layer
    of multi-token prediction is left out.
    """
    c4, c128 = tuple(range(2, 43, 2)), tuple(range(3, 43, 2))
    return ModelShape(
        name,
        (
            LayerSort(c4, _FULL, None, 1, 584, row_tokens=4, block_tokens=256),
            LayerSort(c128, _FULL, None, 1, 584, row_tokens=128, block_tokens=256),
            LayerSort(c4, _FULL, None, 1, 132, row_tokens=4, block_tokens=256, part="indexer"),
            LayerSort(tuple(range(43)), _WINDOW, 128, 1, 584, block_tokens=64, part="swa"),
            _state(c4, 8, 4, 8192, block_tokens=4, part="state"),
            _state(c4, 8, 4, 2048, block_tokens=4, part="indexer_state"),
            _state(c128, 128, 128, 4096, block_tokens=8, part="state"),
        ),
        item_nbytes=None,
        stored_as="fp8_ds_mla",
    )


SHAPES: tuple[ModelShape, ...] = (
    _every(6, 1024, "gemma-3-27b", layers=62, heads=16, head_dim=128),
    _every(2, 128, "gpt-oss-20b", layers=24, heads=8, head_dim=64),
    _every(2, 128, "gpt-oss-120b", layers=36, heads=8, head_dim=64),
    _uniform("llama-3.1-8b", layers=32, heads=8, head_dim=128),
    _uniform("llama-3.1-70b", layers=80, heads=8, head_dim=128),
    _uniform("llama-3.1-405b", layers=126, heads=8, head_dim=128),
    _uniform("qwen3-8b", layers=36, heads=8, head_dim=128),
    _uniform("qwen3-32b", layers=64, heads=8, head_dim=128),
    _uniform("qwen3-30b-a3b", layers=48, heads=4, head_dim=128),
    _uniform("qwen3-235b-a22b", layers=94, heads=4, head_dim=128),
    _mla("deepseek-v3", layers=61, latent=512, rope=64),
    _deepseek_v4("deepseek-v4"),
)


def built_in(name: str) -> ModelShape:
    """The built-in shape called ``name``; case, dots, dashes and an owner are ignored.

    Raises:
        ShapeError: no shape has that name; the error suggests the nearest one, or those that begin
            with it.

    >>> built_in("google/Gemma 3 27B").name
    'gemma-3-27b'
    """
    wanted = _key(name)
    for shape in SHAPES:
        if _key(shape.name) == wanted:
            return shape
    raise ShapeError("model", "a folder, a config.json or a built-in shape", name, _near(wanted))


def _near(wanted: str) -> str:
    """A suggestion; another size or version of a model is none, so numbers have to agree."""
    longer = [shape.name for shape in SHAPES if wanted and _key(shape.name).startswith(wanted)]
    if longer:
        return f"built-in: {', '.join(longer)}"
    numbers = re.findall(r"\d+", wanted)
    alike = [one.name for one in SHAPES if re.findall(r"\d+", _key(one.name)) == numbers]
    near = difflib.get_close_matches(wanted, map(_key, alike), n=1, cutoff=0.8)
    if near:
        meant = next(one for one in alike if _key(one) == near[0])
        return f"did you mean {meant!r}?"
    return "pdconn plan --list has them; for any other model give its config.json"


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
