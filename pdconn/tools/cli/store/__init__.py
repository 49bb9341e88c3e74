"""``pdconn store``: what a root holds, whether it is sound, and how to make it smaller."""
