"""Checks of running engines, over HTTP and side channels."""
