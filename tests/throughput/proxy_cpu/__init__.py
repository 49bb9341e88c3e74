"""Processor time of the proxy for a request and for a streamed chunk; see ``__main__``."""
