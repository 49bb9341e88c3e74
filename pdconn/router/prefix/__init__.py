"""The engines' prefix caches, and how much of a request each could serve.  Pure.

::

    events ──► index ──rows──► score ──► hits          hashing ──chain of a request──┘

``kv_events`` decodes an engine's events, ``block_index`` keeps the cached blocks by the engine's
own block hashes, ``hashing`` computes the hashes of a request's blocks, and ``score`` determines
how much of the request each engine holds.  ``snapshot`` writes and reads all of that as a file.
"""
