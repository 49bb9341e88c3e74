"""``pdconn store``: lists, verifies and trims the contents of a store's root."""
