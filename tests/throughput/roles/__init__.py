"""Roles that follow a shifting load, beside fixed ratios, with real engines."""
