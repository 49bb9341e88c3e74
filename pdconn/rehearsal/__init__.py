"""A pull from ourselves at the start: the first request's pull does nothing for the first time."""
