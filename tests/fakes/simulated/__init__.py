"""Engines without a model: caches and evictions are vLLM's own, computing is a time."""
