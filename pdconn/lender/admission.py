"""Limits of the lender's listener, above those that every listener has."""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.lifecycle.admission import AdmissionLimits


@dataclass(frozen=True, slots=True)
class ConnectionLimits(AdmissionLimits):
    """Bounds of a lender's listener and of each of its connections.

    A connection stalls while its peer has not sent a valid Hello, has sent part of a frame, or
    does not read its replies.

    Attributes:
        claims: claims that one connection may hold.
        checksum_requests: that may wait, of all connections; some 20 kB each at most.
        frame_nbytes: longest frame that a reader may send.
        unsent_nbytes: replies that may wait for one reader.
    """

    claims: int = 1 << 14
    checksum_requests: int = 1024
    frame_nbytes: int = 1 << 20
    unsent_nbytes: int = 1 << 26
