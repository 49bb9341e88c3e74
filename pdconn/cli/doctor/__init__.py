"""``pdconn doctor``."""
