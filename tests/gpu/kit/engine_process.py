"""One vLLM engine in a process, driven by lines of JSON; answers are lines that begin with ``@``.

    {"prompt": [ids], "tokens": n, "logprobs": k, "kv_transfer_params": {…} or null}
    ──► {"tokens": […], "logprobs": […], "top": […], "first_s": s, "pulls": n,
         "finish_reason": …, "kv_transfer_params": …}

``first_s`` is the time from the request to its first token.  The engine has no HTTP server: what is
looked at is the model's runner, its attention, and the connector.

    python -m tests.gpu.kit.engine_process MODEL '{"max_model_len": …}'
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def arguments_of(model: str, options: dict[str, Any]) -> Any:
    """Of an engine without compilation, graphs and compiled kernels."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = options.pop("kv_transfer_config", None)
    native = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
    return EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        attention_backend="TRITON_ATTN",
        compilation_config={"mode": 0, "custom_ops": ["none"]},
        kernel_config={"ir_op_priority": native},
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
        **options,
    )


def facts_of(engine: Any) -> dict[str, Any]:
    """What runs here: for the report, so that no fall-back is silent."""
    import torch
    import vllm

    config = engine.vllm_config
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "platform": type(_platform()).__name__,
        "attention": config.attention_config.backend.name,
        "block_tokens": config.cache_config.block_size,
    }


def answer(engine: Any, request: dict[str, Any], name: str) -> dict[str, Any]:
    """Run one request to its end."""
    from vllm import SamplingParams

    transfer = request.get("kv_transfer_params")
    extra = {"kv_transfer_params": transfer} if transfer else None
    params = SamplingParams(
        temperature=0.0,
        max_tokens=request["tokens"],
        ignore_eos=True,
        logprobs=request["logprobs"],
        extra_args=extra,
    )
    began = time.monotonic()
    first_s = None
    engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
    last: Any = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.outputs[0].token_ids and first_s is None:
                first_s = time.monotonic() - began
            last = output
    chosen = last.outputs[0]
    positions = chosen.logprobs or ()
    top = [{token: one.logprob for token, one in position.items()} for position in positions]
    return {
        "tokens": list(chosen.token_ids),
        "logprobs": [position[t] for position, t in zip(top, chosen.token_ids, strict=True)],
        "top": top,
        "first_s": first_s,
        "pulls": pulls_counted(),
        "finish_reason": chosen.finish_reason,
        "kv_transfer_params": last.kv_transfer_params,
    }


def pulls_counted() -> int:
    """``pdconn:pulls_total`` of this engine: vLLM's front end collects it, step by step."""
    from prometheus_client import REGISTRY

    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return int(sum(one.value for one in samples if one.name == "pdconn:pulls_total"))


def _platform() -> Any:
    from vllm.platforms import current_platform

    return current_platform


def main() -> None:
    """Serve until standard input ends."""
    began = time.monotonic()
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(arguments_of(sys.argv[1], json.loads(sys.argv[2])))
    boot_s = round(time.monotonic() - began, 1)
    print("@" + json.dumps({**facts_of(engine), "boot_s": boot_s}), flush=True)
    for number, line in enumerate(sys.stdin):
        print("@" + json.dumps(answer(engine, json.loads(line), f"kit-{number}")), flush=True)


if __name__ == "__main__":
    main()
