"""Prints every route of the installed vLLM as JSON, whatever model it would serve.

A process of its own: vLLM reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, get_args

#: With what an operator may switch on, all of which a router has to keep from clients.
os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


class _AnyModel:
    """A model configuration for one pooling task."""

    def __init__(self, task: str) -> None:
        self._task = task

    def get_pooling_task(self, tasks: object) -> str:
        return self._task

    def __getattr__(self, name: str) -> int:
        return 1


def _words(kind: Any) -> Iterator[str]:
    for one in get_args(kind):
        yield from (one,) if isinstance(one, str) else _words(one)


def routes() -> list[str]:
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.tasks import SupportedTask
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    profiler = json.dumps({"profiler": "torch", "torch_profiler_dir": "/tmp"})
    words = ["--enable-tokenizer-info-endpoint", "--profiler-config", profiler]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    args.enable_fault_tolerance = True
    tasks = tuple(_words(SupportedTask))
    found = set()
    for task in tasks:
        for route in build_app(args, tasks, _AnyModel(task)).routes:  # type: ignore[arg-type]
            methods = getattr(route, "methods", None) or {"WEBSOCKET"}
            found |= {f"{method} {route.path}" for method in methods - {"HEAD"}}
    return sorted(found)


if __name__ == "__main__":
    print("ROUTES " + json.dumps(routes()))
