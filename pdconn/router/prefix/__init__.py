"""The engines' prefix caches, and how much of a request each could serve.  Pure.

::

    events ──► index ──rows──► score ──► hits          hashing ──chain of a request──┘

``events`` decodes what an engine publishes, ``index`` keeps it by the engine's own block
hashes, ``hashing`` computes the hashes of a request's blocks, and ``score`` finds how much of
them each engine holds.  ``snapshot`` is all of that in a file.
"""
