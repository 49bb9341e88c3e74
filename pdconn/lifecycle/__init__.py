"""State machines of a transfer: lease (prefill), pull and peer (decode).  Pure."""
