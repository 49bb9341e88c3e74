"""(e) As (c), with CUDA graphs: steps of decode are replayed, and so KV memory is written."""

from __future__ import annotations

import sys

from pdconn.tools.lab.model import TINY, write_model
from tests.gpu.kit.found import step_arguments
from tests.gpu.kit.steps.vllm import Model, run_models

MODELS = tuple(
    Model(
        f"gemma-3-like, {mode}",
        lambda folder: write_model(folder, TINY),
        {"block_size": 32, "cudagraph_mode": mode},
    )
    for mode in ("FULL_DECODE_ONLY", "FULL")
)


def main() -> int:
    """Exit status 1: a model failed; the other is looked at all the same."""
    device, found = step_arguments(__doc__)
    return run_models(device, MODELS if device.kind == "cuda" else (), found)


if __name__ == "__main__":
    sys.exit(main())
