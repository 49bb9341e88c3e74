"""Many engines in virtual time: real leases, pulls and plans, simulated wires and faults."""
