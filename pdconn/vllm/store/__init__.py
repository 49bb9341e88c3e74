"""The stores inside an engine: from vLLM's requests, blocks and configuration to our store.

row_keys         what names of rows depend on besides tokens: of an engine, of a prompt
boundary_states  which blocks hold the recurrent state at a boundary
events           KV events of stored rows, in vLLM's own block hashes
storing          the scheduler's part: requests, blocks that are being saved, resets
store_metrics    names and help texts of the store's metrics
"""
