"""Which weights an engine computes with, and proofs of that.

model_files  a digest of the files that weights are loaded from
weights      proofs of an engine's weights: a commit, files, or a name that the operator gives
updates      the proofs after calls that may have changed the weights
changes      effects of such a call on leases, pulls and the store
greeting     the engine's Welcome, and the traits that peers are compared with
adapters     digests of adapters, read on a thread of their own

KV is shared, by leases and through a store, only between engines with proofs of the same weights.
"""
