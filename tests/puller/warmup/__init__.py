"""Lenders that are connected, greeted and read from before any request needs them."""
