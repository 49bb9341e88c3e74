"""What two engines say to each other: messages, framing, tickets.  Pure."""
