"""Agents over a fleet in virtual time: vLLM's own schedulers and caches, our keeps and router."""
