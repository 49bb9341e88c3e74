"""Transports within one process, with real bytes and scripted faults; for tests and simulations.

transport   one peer, whose reads behave like NIXL's; the network of peers, which decides when
            reads land, fail or are lost
faults      the faults, as plain data, and a manual clock

In configuration and ``describe`` this transport is called ``memory``.
"""
