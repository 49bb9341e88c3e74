"""What a store of a model's KV costs: bytes to keep, and the time to load them."""
