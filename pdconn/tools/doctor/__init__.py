"""Checks of a host and of a fleet of engines, for ``pdconn doctor``.

Each subject has a record of facts, one function that gathers them (the only part with IO), and pure
functions that judge them and return findings::

    files, /proc, /sys, HTTP, side channels ──gather──► facts ──judge──► findings

findings    the result of a check: severity, message and remedy
diagnosis   all checks of a run, as text and as JSON
examine     runs the checks one after another
local/      this host: versions, UCX, limits, credentials, configuration, ports, store
fleet/      running engines: HTTP, side channels in pairs, metrics, KV events, a golden prompt
probe       bandwidth to another host
"""
