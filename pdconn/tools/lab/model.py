"""Small generated hybrid models whose answers depend on the whole KV cache.

A correctness check needs a sensitive model.  A model with weights drawn the usual way repeats a
single token for every prompt: its attention is nearly uniform, so each position sees the same
average, and a corrupted block changes nothing.  Here the scales are chosen such that

* attention is broad but not uniform (``_ATTENTION_SPREAD``): scores differ by
  about that many nats, so far tokens weigh little each and yet measurably;
* the output of attention is as large in the residual stream as the current token's
  embedding, and larger in full-attention layers than in window layers;
* logits spread over several nats, so that greedy answers vary from token to
  token and top candidates are seldom tied.

Changing the first of 3000 prompt tokens moves log-probabilities by more than
0.1; rounding noise stays below 1e-4.

The architecture is Gemma 3's text model: vLLM splits its layers into KV cache
groups of full attention and of sliding windows.  The files depend on the ``ModelSpec``
only, so two machines write the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import string
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Weight = NDArray[np.float32]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Tokens used only by the tokenizer and the chat template.

Their rows of the unembedding are zero, so no greedy answer contains one or ends early.
"""
FIRST_WORD = len(SPECIAL_TOKENS)

CHARACTERS = string.digits + string.ascii_letters + string.punctuation
"""Single characters, if the vocabulary has room, so that other texts give other tokens."""
_WORDS_PER_CHARACTER = 10

_FORMAT = 2  # increase when a change of this code changes the files
_ATTENTION_SPREAD = 1.5  # standard deviation of attention scores, in nats
_EMBEDDING = 2.0  # RMS of a token's embedding in the residual stream
_WINDOW_ATTENTION = 1.0  # RMS that a window layer's attention adds to it
_FULL_ATTENTION = 1.5  # ... that a full-attention layer's adds
_FEED_FORWARD = 0.6  # ... that a feed-forward block adds
_LOGITS = 4.0  # standard deviation of logits

_CHAT_TEMPLATE = (
    "<bos>{% for message in messages %} w4 {{ message['content'] }} w5{% endfor %}"
    "{% if add_generation_prompt %} w6{% endif %}"
)


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a small hybrid model.  Sizes are in elements, windows in tokens."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 32
    layers: int = 6
    full_every: int = 3
    window: int = 64
    vocab: int = 2048
    max_positions: int = 8192
    seed: int = 20

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        if self.vocab <= FIRST_WORD:
            raise ValueError(f"a vocabulary of {self.vocab} has no words: {FIRST_WORD} are special")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Attention kind of each layer, as ``transformers`` names it."""
        return tuple(
            "full_attention" if (layer + 1) % self.full_every == 0 else "sliding_attention"
            for layer in range(self.layers)
        )

    @property
    def digest(self) -> str:
        """A digest of the content: equal digests mean equal files."""
        scales = (_ATTENTION_SPREAD, _EMBEDDING, _WINDOW_ATTENTION, _FULL_ATTENTION)
        rest = (_FORMAT, *scales, _FEED_FORWARD, _LOGITS, SPECIAL_TOKENS, _CHAT_TEMPLATE)
        text = json.dumps([asdict(self), rest], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


TINY = ModelSpec("tiny", hidden=128, intermediate=256, heads=4, kv_heads=2)
"""The smallest model with every kind of group; for correctness."""
HANDOVER = ModelSpec("handover", hidden=256, intermediate=512, heads=8, kv_heads=4)
"""A model whose prefill takes much longer than one decode step; for timing."""
SPECS = {spec.name: spec for spec in (TINY, HANDOVER)}


def write_model(cache: Path, spec: ModelSpec = TINY) -> Path:
    """Write ``spec`` under ``cache`` unless it exists, and return its directory.

    Takes about a second.  The directory is renamed into place, so several processes may
    call this at once.
    """
    directory = cache / f"{spec.name}-{spec.digest}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=cache))
    try:
        _write_files(scratch, spec)
        scratch.chmod(0o755)
        os.rename(scratch, directory)
    except OSError:
        if not directory.is_dir():  # otherwise another process won, with the same bytes
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _write_files(directory: Path, spec: ModelSpec) -> None:
    from safetensors.numpy import save_file

    config = {**_config(spec), "architectures": ["Gemma3ForCausalLM"]}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": 2, "pad_token_id": 0})
    save_file(dict(weights(spec)), directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory, spec)


def _config(spec: ModelSpec) -> dict[str, Any]:
    """The config that the installed ``transformers`` makes from ``spec``."""
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        query_pre_attn_scalar=spec.head_dim,
        sliding_window=spec.window,
        layer_types=list(spec.layer_types),
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    return dict(config.to_dict())


def weights(spec: ModelSpec) -> Iterator[tuple[str, Weight]]:
    """Every parameter of ``spec`` by name, float32, the same on every machine."""
    import numpy as np

    source = np.random.default_rng(spec.seed)

    def random(rows: int, columns: int, scale: float) -> Weight:
        drawn = source.standard_normal((rows, columns), dtype=np.float32)
        return (drawn * np.float32(scale / columns**0.5)).astype(np.float32)

    def norm(size: int, gain: float = 1.0) -> Weight:
        return np.full(size, gain - 1.0, dtype=np.float32)  # Gemma multiplies by 1 + weight

    yield "model.embed_tokens.weight", random(spec.vocab, spec.hidden, _EMBEDDING)
    for layer, kind in enumerate(spec.layer_types):
        prefix = f"model.layers.{layer}"
        gathered = _FULL_ATTENTION if kind == "full_attention" else _WINDOW_ATTENTION
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        yield f"{prefix}.self_attn.q_proj.weight", random(queries, spec.hidden, 1.0)
        yield f"{prefix}.self_attn.k_proj.weight", random(keys, spec.hidden, 1.0)
        yield f"{prefix}.self_attn.v_proj.weight", random(keys, spec.hidden, 1.0)
        yield f"{prefix}.self_attn.o_proj.weight", random(spec.hidden, queries, 1.0)
        yield f"{prefix}.self_attn.q_norm.weight", norm(spec.head_dim, _ATTENTION_SPREAD)
        yield f"{prefix}.self_attn.k_norm.weight", norm(spec.head_dim)
        yield f"{prefix}.mlp.gate_proj.weight", random(spec.intermediate, spec.hidden, 1.0)
        yield f"{prefix}.mlp.up_proj.weight", random(spec.intermediate, spec.hidden, 1.0)
        yield f"{prefix}.mlp.down_proj.weight", random(spec.hidden, spec.intermediate, 1.0)
        yield f"{prefix}.input_layernorm.weight", norm(spec.hidden)
        yield f"{prefix}.post_attention_layernorm.weight", norm(spec.hidden, gathered)
        yield f"{prefix}.pre_feedforward_layernorm.weight", norm(spec.hidden)
        yield f"{prefix}.post_feedforward_layernorm.weight", norm(spec.hidden, _FEED_FORWARD)
    yield "model.norm.weight", norm(spec.hidden)
    head = random(spec.vocab, spec.hidden, _LOGITS)
    head[:FIRST_WORD] = 0.0
    yield "lm_head.weight", head


def _write_tokenizer(directory: Path, spec: ModelSpec) -> None:
    """A word per token, ``w4`` and on, so that the id of a word is readable; then characters."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.pre_tokenizers import WhitespaceSplit

    spelling = CHARACTERS if spec.vocab > _WORDS_PER_CHARACTER * len(CHARACTERS) else ""
    numbered = (f"w{i}" for i in range(FIRST_WORD, spec.vocab - len(spelling)))
    words = [*SPECIAL_TOKENS, *numbered, *spelling]
    ids = {word: i for i, word in enumerate(words)}
    # Longest piece first, and no mark on pieces that continue a word.
    tokenizer = Tokenizer(WordPiece(ids, unk_token="<unk>", continuing_subword_prefix=""))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(
        zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True)
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
        **names,
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
