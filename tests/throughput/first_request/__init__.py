"""The first request of fresh engines: see ``__main__``."""
