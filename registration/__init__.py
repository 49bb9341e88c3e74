"""What an engine's KV memory looks like, and pinning it once."""
