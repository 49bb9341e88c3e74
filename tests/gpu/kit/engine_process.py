"""One vLLM engine in a process, driven by lines of JSON; answers are lines that begin with ``@``.

    {"prompt": [ids], "tokens": n, "logprobs": k, "kv_transfer_params": {…} or null}
    ──► {"tokens": […], "logprobs": […], "top": […], "first_s": s, "counts": {name: n},
         "finish_reason": …, "kv_transfer_params": …}

``first_s`` is the time from the request to its first token; ``counts`` are the connector's counters
of all requests so far.  The engine has no HTTP server: what is
looked at is the model's runner, its attention, and the connector.

    python -m tests.gpu.kit.engine_process MODEL '{"max_model_len": …}'
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOGPROBS = 5
COUNTED = ("pdconn:", "vllm:external_prefix_cache")


class EngineEnded(Exception):
    """An engine's process ended, or did not start in time."""


class WrongLength(Exception):
    """An answer has another number of tokens than was asked for: the request failed."""


class EngineProcess:
    """One engine, in a session of its own; its log is a file.

    Args:
        options: of the engine, see ``EngineArgs``.
        env: further variables.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        options: dict[str, Any],
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._log = name, log
        command = [sys.executable, "-m", "tests.gpu.kit.engine_process", str(model)]
        self._process = subprocess.Popen(
            [*command, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            text=True,
            env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr", **(env or {})},
            start_new_session=True,
        )

    def answered(self) -> dict[str, Any]:
        """Its next line of JSON.

        Raises:
            EngineEnded: with the end of its log.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):  # others are not ours
                found: dict[str, Any] = json.loads(line[1:])
                return found
        raise EngineEnded(f"{self._name}: {self._tail()}")

    def ask(self, prompt: Sequence[int], tokens: int, transfer: Any = None) -> dict[str, Any]:
        """Its answer to a prompt."""
        self.begin(prompt, tokens, transfer)
        return self.ended(tokens)

    def begin(self, prompt: Sequence[int], tokens: int, transfer: Any = None) -> None:
        """Ask, and do not wait; :meth:`ended` must follow before the next request."""
        request = {"prompt": list(prompt), "tokens": tokens, "logprobs": LOGPROBS}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request | {"kv_transfer_params": transfer}) + "\n")
        self._process.stdin.flush()

    def ended(self, tokens: int) -> dict[str, Any]:
        """The answer to the request that was begun."""
        answered = self.answered()
        if len(answered["tokens"]) != tokens:
            said = f"{len(answered['tokens'])} tokens, {answered['finish_reason']}"
            raise WrongLength(f"{self._name}: expected {tokens} tokens, got {said}: {self._tail()}")
        return answered

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """Kill its processes: an engine that hangs must not cost the next model."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def end_at_sigterm() -> None:
    """Let a step that is told to end leave its contexts, and so end its engines."""

    def leave(number: int, _frame: Any) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def arguments_of(model: str, options: dict[str, Any]) -> Any:
    """Of an engine without compilation and compiled kernels; ``cudagraph_mode`` is one of vLLM's.

    Without a mode it has no graphs either.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = options.pop("kv_transfer_config", None)
    graphs = options.pop("cudagraph_mode", None)
    native = {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
    return EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=graphs is None,
        attention_backend="TRITON_ATTN",
        compilation_config={"mode": 0, "custom_ops": ["none"], "cudagraph_mode": graphs or "NONE"},
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
        "graphs": config.compilation_config.cudagraph_mode.name,
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
        "counts": counted(),
        "finish_reason": chosen.finish_reason,
        "kv_transfer_params": last.kv_transfer_params,
    }


def counted() -> dict[str, int]:
    """Counters of the connector and of its hits that are not 0: vLLM collects them step by step."""
    from prometheus_client import REGISTRY

    found: dict[str, int] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith(COUNTED) and sample.name.endswith("_total"):
                found[sample.name] = found.get(sample.name, 0) + int(sample.value)
    return {name: value for name, value in found.items() if value}


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
