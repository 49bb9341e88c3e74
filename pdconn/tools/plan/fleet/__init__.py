"""A fleet of engines under a load, in virtual time."""
