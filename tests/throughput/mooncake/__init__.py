"""Mooncake's published traces, replayed over simulated engines."""
