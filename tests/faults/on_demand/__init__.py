"""Faults on demand: what ``debug_faults`` takes, and what its relay does to frames."""
