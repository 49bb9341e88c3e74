"""Ratio and speed of lossless compression on the KV of small real models.

    PYTHONPATH=EXTRA python -m tests.throughput.compression --json compression.json

What is compressed at once is one head's part of a row, the least that a rank loads: 1.5 to 4.5 MiB
in 16 bits.  Times are CPU time of one thread over all rows of a prompt: of the whole way, numpy's
arranging included, and of the codec alone, which is what a faster arranging could reach.
Everything is decompressed and compared.  See the package for what must be installed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdconn.tools.output.table import table
from tests.throughput.compression.arrangements import (
    ARRANGEMENTS,
    Arrangement,
    Parts,
    Unit,
    split_number,
)
from tests.throughput.compression.four_bits import FourBits
from tests.throughput.compression.kv import (
    WEIGHTS,
    Model,
    PackageMissing,
    imported,
    kv_by_dtype,
    texts,
    units_of_rows,
)

LEAST_RATIO, LEAST_GBPS = 1.25, 1.5
"""What is worth building: the ratio for every model, and GB/s of a core each way."""

EXPONENT_BITS = {"bf16": 8, "fp16": 5, "fp8 e4m3": 4}

NO_CODEC = "none"
CODECS = ("zstd_1", "zstd_3", "lz4", NO_CODEC)


@dataclass(frozen=True)
class Codec:
    """A codec of a wheel; ``compress`` and ``decompress`` take and give bytes."""

    compress: Callable[[Any], bytes]
    decompress: Callable[[bytes], bytes]


@dataclass(frozen=True)
class Sample:
    """One way over one prompt of one model.  Rates are GB/s of bytes before compression.

    A codec alone that takes no time has no rate.
    """

    model: str
    text: str
    dtype: str
    arrangement: str
    codec: str
    ratio: float
    compress_gbps: float
    decompress_gbps: float
    codec_compress_gbps: float | None
    codec_decompress_gbps: float | None


@dataclass(frozen=True)
class Bits:
    """Of one model and dtype: what an exponent takes, and what is to be had at most.

    Attributes:
        nbytes: of a head's part of a row.
        perplexity: of the bfloat16 model, over all prompts.
        exponent: bits that an exponent has.
        entropy: bits that exponents carry; given their layer, head, channel and whether they are of
            a key or a value.
        limit: ratio of a code of that length, sign and mantissa as they are.
    """

    model: str
    weights: str
    dtype: str
    nbytes: int
    perplexity: float
    exponent: int
    entropy: float
    limit: float


def codecs() -> dict[str, Codec]:
    """By the names of the result.

    Raises:
        PackageMissing: zstandard or lz4 is not installed.
    """
    zstd, lz4 = imported("zstandard"), imported("lz4.block")
    decompress = zstd.ZstdDecompressor().decompress
    found = {
        f"zstd_{level}": Codec(zstd.ZstdCompressor(level=level).compress, decompress)
        for level in (1, 3)
    }
    return {**found, "lz4": Codec(lambda part: bytes(lz4.compress(part)), lz4.decompress)}


@dataclass
class _Times:
    """CPU seconds, of all units."""

    split: float = 0.0
    compress: float = 0.0
    decompress: float = 0.0
    join: float = 0.0


def over_units(
    arrangement: Arrangement, codec: Codec | None, units: Sequence[Unit]
) -> tuple[int, _Times]:
    """Bytes of all units when they are compressed, and the times.

    Raises:
        RuntimeError: a unit came back changed.
    """
    nbytes, times, now = 0, _Times(), time.thread_time
    for unit in units:
        began = now()
        parts: Parts = arrangement.split(unit)
        split = now()
        coded = [codec.compress(part) for part in parts.coded] if codec else []
        compressed = now()
        plain = [codec.decompress(part) for part in coded] if codec else []
        decompressed = now()
        back = arrangement.join(plain, parts.kept, unit)
        joined = now()
        times.split += split - began
        times.compress += compressed - split
        times.decompress += decompressed - compressed
        times.join += joined - decompressed
        nbytes += sum(map(len, coded)) + sum(part.nbytes for part in parts.kept)
        if not np.array_equal(back, unit):
            raise RuntimeError(f"{arrangement}: a unit of {unit.dtype} came back changed")
    return nbytes, times


def sampled(
    where: tuple[str, str, str], units: Sequence[Unit], every: Mapping[str, Codec], rounds: int
) -> list[Sample]:
    """All ways over the units of one prompt, in turns; the rates are of the median round."""
    ways: list[tuple[str, Arrangement, str, Codec | None]] = [
        (name, arrangement, codec, each)
        for name, arrangement in ARRANGEMENTS.items()
        for codec, each in every.items()
    ]
    if where[2] == "bf16":
        ways.append(("exponents in 4 bits", FourBits(), NO_CODEC, None))
    found: dict[tuple[str, str], list[_Times]] = defaultdict(list)
    ratios, total = {}, sum(unit.nbytes for unit in units)
    for _ in range(rounds):
        for name, arrangement, codec, each in ways:
            nbytes, times = over_units(arrangement, each, units)
            found[name, codec].append(times)
            ratios[name, codec] = total / nbytes
    return [_sample(where, way, ratios[way], found[way], total) for way in found]


def _sample(
    where: tuple[str, str, str],
    way: tuple[str, str],
    ratio: float,
    rounds: Sequence[_Times],
    total: int,
) -> Sample:
    def gbps(*fields: str) -> float:
        taken = [float(sum(getattr(times, field) for field in fields)) for times in rounds]
        return total / statistics.median(taken) / 1e9

    has_codec = way[1] != NO_CODEC
    return Sample(
        *where,
        *way,
        ratio,
        gbps("split", "compress"),
        gbps("decompress", "join"),
        gbps("compress") if has_codec else None,
        gbps("decompress") if has_codec else None,
    )


def entropy_of_exponents(units: Sequence[Unit], width: int) -> float:
    """Bits of an exponent given its layer, head, channel and key or value: a mean over units.

    Counted over the tokens of all rows of a head, of which units are a multiple.
    """
    stacked = np.concatenate(units, axis=1)
    plane = (split_number(stacked)[0] >> (8 - width if width > 4 else 0)).astype(np.int64)
    layers, tokens, two, size = plane.shape
    columns = plane.transpose(0, 2, 3, 1).reshape(layers * two * size, tokens)
    keys = (columns + 256 * np.arange(len(columns))[:, None]).reshape(-1)
    share = np.bincount(keys, minlength=256 * len(columns)).reshape(-1, 256) / tokens
    logs = np.log2(share, where=share > 0, out=np.zeros_like(share))
    bits: float = -(share * logs).sum() / len(columns)
    return float(bits)


def measured(options: argparse.Namespace) -> tuple[list[Sample], list[Bits]]:
    """All models, prompts, dtypes and ways."""
    every, samples, bits = codecs(), [], []
    for name in options.models:
        model, losses, kept = Model(name), [], defaultdict(list)
        for kind, text in texts().items():
            kv, nll = kv_by_dtype(model, text, options.tokens)
            losses.append(nll)
            for dtype, each in kv.items():
                units = units_of_rows(each)
                kept[dtype].append((len(each), units))
                samples += sampled((name, kind, dtype), units, every, options.rounds)
            print(f"{name}, {kind}: measured", file=sys.stderr)
        for dtype, prompts in kept.items():
            bits.append(_bits_of(name, dtype, prompts, math.exp(statistics.mean(losses))))
    return samples, bits


def _bits_of(
    name: str, dtype: str, prompts: Sequence[tuple[int, list[Unit]]], perplexity: float
) -> Bits:
    width = EXPONENT_BITS[dtype]
    found = [
        entropy_of_exponents(units[head::heads], width)
        for heads, units in prompts
        for head in range(heads)
    ]
    entropy = statistics.mean(found)
    unit = prompts[0][1][0]
    number = 8 * unit.itemsize
    limit = number / (number - width + entropy)
    quantised = WEIGHTS[name].quantised
    return Bits(name, quantised, dtype, unit.nbytes, perplexity, width, entropy, limit)


@dataclass(frozen=True)
class Cell:
    """One way over all models and prompts: the range of ratios, and median rates.

    ``misses`` is what it has too little of, in words.
    """

    least_ratio: float
    most_ratio: float
    compress_gbps: float
    decompress_gbps: float
    codec_compress_gbps: float | None
    codec_decompress_gbps: float | None
    misses: str

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Cell:
        """The cell of one dtype, arrangement and codec."""

        def median(values: Sequence[float | None]) -> float | None:
            known = [value for value in values if value is not None]
            return statistics.median(known) if known else None

        ratios = [each.ratio for each in samples]
        into = statistics.median(each.compress_gbps for each in samples)
        out = statistics.median(each.decompress_gbps for each in samples)
        short = ["ratio"] * (min(ratios) < LEAST_RATIO) + ["speed"] * (min(into, out) < LEAST_GBPS)
        return cls(
            min(ratios),
            max(ratios),
            into,
            out,
            median([each.codec_compress_gbps for each in samples]),
            median([each.codec_decompress_gbps for each in samples]),
            " and ".join(short) or "nothing",
        )


def rows_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row for each dtype and arrangement: a cell for each codec, None where it was not tried."""
    by_way: dict[tuple[str, str], dict[str, list[Sample]]] = {}
    for sample in sorted(samples, key=lambda each: list(EXPONENT_BITS).index(each.dtype)):
        of_way = by_way.setdefault((sample.dtype, sample.arrangement), defaultdict(list))
        of_way[sample.codec].append(sample)
    return [
        {"dtype": dtype, "arrangement": arrangement}
        | {
            codec: asdict(Cell.from_samples(of_codec[codec])) if codec in of_codec else None
            for codec in CODECS
        }
        for (dtype, arrangement), of_codec in by_way.items()
    ]


def printed(rows: Sequence[Mapping[str, Any]], bits: Sequence[Bits]) -> str:
    """Both tables."""
    body = [
        [row["dtype"], row["arrangement"], codec, f"{cell['least_ratio']:.3f}",
         f"{cell['most_ratio']:.3f}", _rate(cell["compress_gbps"]), _rate(cell["decompress_gbps"]),
         _rate(cell["codec_compress_gbps"]), _rate(cell["codec_decompress_gbps"]), cell["misses"]]
        for row in rows
        for codec in CODECS
        if (cell := row[codec]) is not None
    ]  # fmt: skip
    heads = ["dtype", "arrangement", "codec", "ratio\nleast", "ratio\nmost", "GB/s\nin",
             "GB/s\nout", "codec\nin", "codec\nout", "misses"]  # fmt: skip
    below = [
        [each.model, each.weights, each.dtype, f"{each.perplexity:.1f}",
         f"{each.nbytes / (1 << 20):.2f}", f"{each.entropy:.2f} of {each.exponent}",
         f"{each.limit:.3f}"]
        for each in bits
    ]  # fmt: skip
    beside = ["model", "weights", "dtype", "perplexity", "unit\nMiB", "exponent\nbits", "limit"]
    return table(heads, body) + "\n\n" + table(beside, below)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def main() -> int:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--tokens", type=int, default=2048, help="of each prompt (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="of each way (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write all measurements")
    options = parser.parse_args()
    try:
        samples, bits = measured(options)
    except PackageMissing as error:
        print(f"compression: {error}", file=sys.stderr)
        return 2
    rows = rows_of(samples)
    print(printed(rows, bits))
    if options.json is not None:
        document = {
            "tokens": options.tokens,
            "texts": list(texts()),
            "rows": rows,
            "models": [asdict(each) for each in bits],
            "samples": [asdict(sample) for sample in samples],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
