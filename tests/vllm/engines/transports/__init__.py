"""Real vLLM over other transports than the default."""
