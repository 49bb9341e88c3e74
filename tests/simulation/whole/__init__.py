"""Whole engines in virtual time: vLLM's own scheduler over our connector, sessions and pulls."""
