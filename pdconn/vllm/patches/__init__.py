"""All code of pdconn that replaces, writes or depends on internals of vLLM, one file each.

Connectors' hooks, configurations and descriptions of memory are no internals: vLLM passes them to
connectors.  Each file documents what it does to which internal and why; ``SOURCES`` has the place
of that internal, by its line in vLLM 0.32.0 and 0.33.0.

tested_versions   refuses untested versions of vLLM, unless the user allows them
self_test         tests assumptions about internals on the live engine, at its start
live              the engine's block manager during that test
built             finds the scheduler that binds us, and checks what its methods use

deferred_frees    frees blocks that a step in flight may still write after that step
failed_loads      recomputes optional loads that fail, whatever the policy
cache_resets      notifies all parts of resets of the prefix cache
step_order        checks that connectors are called before a step's tokens count as computed
request_writes    shortens prompts, and checks fields of requests
pool              the block manager and its pool: pins, windows, hits, states

early_check       checks our configuration before weights are loaded
engine_calls      notifies of calls that may change weights, before they are made
stop_signal       lets an engine that is shutting down wait for its leases
connector_names   our names in the registry, and the in-tree connector's

The docstring of each file names its check at the start; a test compares the list.
"""
