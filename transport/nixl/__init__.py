"""The transport over NIXL; importing this package does not import nixl.

transport   connects and disconnects peers, registers memory; imports nixl when constructed
reads       posts reads and decides when each is over: NIXL cannot cancel
agent       one NIXL agent, and the oddities of NIXL
options     parameters of NIXL's backends, and the UCX settings in use
errors      NIXL's exceptions, mapped to ``transport.errors``
"""
