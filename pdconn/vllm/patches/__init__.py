"""Everything of pdconn that replaces, writes or leans on an inside of vLLM, one file each.

Hooks of connectors, configurations and descriptions of memory are no insides: vLLM gives them to
connectors.  A file of this room says what it does to which inside and why; ``SOURCES`` says where
that inside is, by its line in vLLM 0.32.0 and 0.33.0.

tested_versions   versions that were not tested are refused, unless the user asks for them
self_test         what is believed of the insides is tried on the live engine, at its start
live              the engine's block manager, lent to that test
built             the scheduler that binds us is found, and what its methods use is checked

deferred_frees    blocks that a step in flight may still write are freed once it is over
failed_loads      optional loads that fail are recomputed, whatever the policy says
cache_resets      resets of the prefix cache are seen by all that keep something of it
step_order        connectors are asked before a step's tokens count as computed
request_writes    prompts that are shortened, and what is read of requests
pool              the block manager and its pool: pins, windows, hits, states

early_check       our configuration is checked before weights are loaded
engine_calls      calls that may change weights are seen before they are made
stop_signal       an engine that is asked to stop waits for its leases
connector_names   names in the registry, for the in-tree connector's as well

A file of this room is checked at the start, by what its docstring names; a test holds the list.
"""
