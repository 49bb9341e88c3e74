"""The side channel: connections, their security, and the queues between threads."""
