"""What two engines exchange: messages, framing, handshake, tickets.  Pure."""
