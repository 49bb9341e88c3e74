"""Threads and sockets: the lender of a prefill engine, the puller of a decode rank."""
