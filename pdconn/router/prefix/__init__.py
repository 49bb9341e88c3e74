"""What each engine's prefix cache holds, and how much of a request it could serve.  Pure.

::

    events ──► index ──rows──► score ──► hits          hashing ──chain of a request──┘

``events`` decodes what an engine says, ``index`` remembers it by the engine's own block
hashes, ``hashing`` computes the hashes that a request would have, and ``score`` says where
its prefix can be continued.  ``snapshot`` is all of that in a file.
"""
