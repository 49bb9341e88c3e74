"""Which weights an engine computes with, and what proves it.

files      a digest of the files that weights are loaded from
weights    what proves an engine's weights: a commit, files, or a name that the operator gives
updates    what proves them after calls that may have changed them
changes    what follows from such a call for what is lent, pulled and stored
greeting   what peers are told, and what they are compared with
adapters   digests of adapters, read aside

Rows of a store are shared by engines whose weights are proven to be the same, and by no others; and
so is what engines lend to each other.
"""
