"""Memory orders of KV cache pages, as vLLM names them.

A layout is a memory order from outer to inner: L(ayer), B(lock), H(ead), N (tokens), C(ontent of a
row, K and V together).

Source: ``KVCacheLayout`` of vLLM, 0.32 and 0.33.
"""

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")

PREFERRED = "LBHNC"
"""The layout that pdconn asks vLLM for, as vLLM's own connectors do.  Heads lie outside tokens, so
that a head's share of a block is one run, no backend reads it slower, and no model is refused."""
