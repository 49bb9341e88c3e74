"""Whether the router's cost model takes the faster of pulling a prefix and computing it."""
