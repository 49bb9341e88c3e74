"""Which bytes to read from whom: topology, templates, plans.  Pure, numpy."""
