"""The transport over NIXL; importing this package does not import nixl.

transport      connects and disconnects peers, registers memory; imports nixl when constructed
agent_reads    posts reads and decides when each has settled: NIXL cannot cancel
agent          one NIXL agent, with workarounds for NIXL
agent_options  parameters of NIXL's backends, and the UCX settings in use
agent_errors   NIXL's exceptions, mapped to ``transport.errors``
posix_files    reads and writes files by NIXL's POSIX backend
"""
