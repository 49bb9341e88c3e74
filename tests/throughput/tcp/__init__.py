"""Measurements of reads over TCP."""
