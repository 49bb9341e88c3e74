"""Which weights an engine computes with, and what proves it.

files      a digest of the files that weights are loaded from
weights    what proves an engine's weights: a commit, files, or a name that the operator gives

Rows of a store are shared by engines whose weights are proven to be the same, and by no others.
"""
