"""What tests of transports, and of what stands on them, need.

inprocess/  a transport within one process, with faults on demand
contract    what every transport does, as test classes that a new transport inherits, with pytest;
            ``TransportContract`` is all of them
rig         a reader connected to a lender, and the bytes on both sides
"""
