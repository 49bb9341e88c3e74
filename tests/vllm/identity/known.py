"""Weights of engines that are the same."""

from __future__ import annotations

from pdconn.vllm.identity.weights import Weights

SAME = {"model": Weights(("files:a",)), "draft": Weights(("files:b",))}
