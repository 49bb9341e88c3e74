"""Which bytes to read from which rank: topology, templates, plans.  Pure, numpy."""
