"""``make fresh``: whether pdconn works where nothing of this machine is."""
