"""The cost of a store of a model's KV: bytes kept, and the time to load them."""
