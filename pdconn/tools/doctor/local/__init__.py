"""Checks of the host that the command runs on."""
