"""Engines that are forked from one process that has imported vLLM.

A vLLM server imports for eight seconds of a core, and then needs two more until it serves.  The
tests start some two hundred, so they have one process import what all of them do, and fork it::

    pytest ──► server (vllm imported) ──fork──► keeper ──fork──► engine
       └──────────── pipes of each keeper ─────────┘

Everything from the command line on is the engine's own: it parses its arguments, loads plugins and
models, and opens NIXL.  What is alike among forked engines is the seed of ``hash()`` and the order
of imports.  The session's engine ``alone``, the demo, ``pdconn bench`` and the tests across network
namespaces start theirs as users do.
"""
