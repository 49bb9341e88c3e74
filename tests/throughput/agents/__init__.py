"""Agents: sessions whose turns come back after pauses, beside a flood of one-off prompts."""
