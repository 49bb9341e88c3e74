"""Checksums of lent KV, compared after the pull: ``verify: off | sample | always``."""
