"""Faults on demand in side-channel messages: configuration, frames, and a relay."""
