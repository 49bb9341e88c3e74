"""Compressed rows: what is packed comes back, smaller where it can be, whatever the bytes are."""
