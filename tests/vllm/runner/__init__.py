"""Model runner V2, which vLLM uses on every GPU, as far as it concerns a connector."""
