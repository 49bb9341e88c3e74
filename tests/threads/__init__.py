"""Threads of ours and the boxes between them."""
