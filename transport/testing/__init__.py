"""The contract of transports, as tests that a new transport inherits; needs pytest.

contract    what every transport does, as test classes; ``TransportContract`` is all of them
rig         a reader connected to a lender, and the bytes on both sides
"""
