"""Effect of pulls on the intervals between tokens of running requests; see ``__main__``."""
