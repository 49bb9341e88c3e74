"""The stores inside an engine: from vLLM's requests, blocks and configuration to our store.

identity   the namespace: everything that makes KV of equal tokens differ between engines
extras     what else than its tokens a prompt's KV depends on
states     which blocks hold the recurrent state at a boundary
storing    the scheduler's part: requests, blocks that are being saved, resets
"""
