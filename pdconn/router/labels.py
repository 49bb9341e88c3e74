"""Label values of the router's metrics, each with its meaning.

An outcome or a reason is a member of an enum that derives from ``LabelValue``; ``metric_table``
maps each label to its enum.  The series of each value exist from the start, and ``docs/metrics.md``
is generated from here.
"""

from __future__ import annotations

from enum import Enum
from typing import Self


class LabelValue(Enum):
    """A value of a label; ``meaning`` is its line in the documentation.

    >>> class End(LabelValue):
    ...     OK = ("ok", "The client has its answer.")
    >>> End.OK.value, End("ok").meaning
    ('ok', 'The client has its answer.')
    """

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        """Make ``value`` alone the member's value."""
        made = object.__new__(cls)
        made._value_ = value
        made.meaning = meaning
        return made


class Fault(Enum):
    """The side that a request's outcome is blamed on."""

    NONE = "none"
    CLIENT = "client"
    SERVICE = "service"
    #: A limit or a stop that the operator configured.
    LIMIT = "limit"


class RequestEnd(LabelValue):
    """How a client's request ended: the label ``outcome`` of ``requests_total``.

    ``fault`` decides the colour on the admin page, which spans are failed, and what alerts count.
    """

    OK = ("ok", Fault.NONE, "The client has the whole answer.")
    REFUSED = (
        "refused",
        Fault.CLIENT,
        "The router refused it for a mistake of the client: JSON, fields, size, an unknown model.",
    )
    CLIENT_ERROR = (
        "client_error",
        Fault.CLIENT,
        "An engine refused it for a mistake of the client (4xx, 501), such as a prompt that is too "
        "long or a temperature below 0; in a stream too.",
    )
    CLIENT_LEFT = (
        "client_left",
        Fault.CLIENT,
        "The client closed its connection before it had the whole answer.",
    )
    ENGINE_ERROR = (
        "engine_error",
        Fault.SERVICE,
        "An engine answered 5xx or 429, or with an error in a stream.",
    )
    BROKEN_STREAM = (
        "broken_stream",
        Fault.SERVICE,
        "An engine's connection broke in the middle of an answer.",
    )
    NO_ENGINE = ("no_engine", Fault.SERVICE, "No engine of some role answered: 503.")
    NO_HANDOVER = (
        "no_handover",
        Fault.SERVICE,
        "It got no ticket, and `--require-prefill` forbids decode to compute it: 503.",
    )
    TIMED_OUT = ("timed_out", Fault.SERVICE, "`--request-timeout` ended before the answer did.")
    BUSY = (
        "busy",
        Fault.LIMIT,
        "The router holds as much as it may, for all clients together: 503.",
    )
    UNSEEN = (
        "unseen",
        Fault.NONE,
        "A gateway had the request, and tells the picker of no answer (`response_header_mode`).",
    )
    GATEWAY_ERROR = (
        "gateway_error",
        Fault.SERVICE,
        "A gateway sent the picker a message that cannot be read.",
    )
    CUT_OFF = ("cut_off", Fault.LIMIT, "The router stopped before the answer was whole.")

    fault: Fault
    is_failure: bool
    """Whether the request failed, and not because of its client."""

    def __new__(cls, value: str, fault: Fault, meaning: str) -> Self:
        """Make ``value`` alone the member's value."""
        made = object.__new__(cls)
        made._value_, made.fault, made.meaning = value, fault, meaning
        made.is_failure = fault not in (Fault.NONE, Fault.CLIENT)
        return made


class CallRefused(LabelValue):
    """Why a picker ended a gateway's call: the label of `gateway_calls_refused_total`."""

    MALFORMED = ("malformed", "A message of the gateway could not be read.")
    SILENT = ("silent", "No head of a request came in `--stall-timeout`.")
    TOO_MANY = ("too_many", "As many calls were open as requests may be in flight and wait: 503.")
    UNFIT = ("unfit", "The gateway's external processor has a mode that no picker can serve: 500.")


class PickEnd(LabelValue):
    """Where a gateway sent a request: the label `answered_by` of `picks_total`."""

    FIRST = ("first", "To the first endpoint that the picker named.")
    NEXT = ("next", "To another one that it named: the first could not be reached, or is unknown.")
    ELSEWHERE = ("elsewhere", "To one that it did not name: the gateway does not know those.")
    UNTOLD = ("untold", "The gateway does not tell (`response_attributes`), or answered itself.")


class RoleVerdict(LabelValue):
    """Why the controller of roles moves an engine or not: the label of `role_verdicts_total`."""

    MOVING = ("moving", "An engine finishes its requests before it takes its new role.")
    BEGAN = ("began", "An engine begins to change its role.")
    ENDED = ("ended", "An engine has taken its new role, with or without requests of the old one.")
    GIVEN_UP = ("given_up", "The engine that was changing went down, drains, or left.")
    UNKNOWN = ("unknown", "Reports of half of a role's engines are old or absurd.")
    BELOW_FLOOR = ("below_floor", "A role has too few engines, and no other can be moved now.")
    IN_TARGET = ("in_target", "Both roles keep their targets.")
    NO_BETTER = ("no_better", "A role is short, and no other ratio is better by enough.")
    UNSTEADY = ("unsteady", "A role is short, but not for long enough.")
    TOO_SOON = ("too_soon", "An engine changed its role shortly before.")


class IndexKind(LabelValue):
    """What the prefix index is made of: the label ``index`` of ``build_info``."""

    COMPILED = ("compiled", "C++ decodes events, keeps who holds which block, and hashes prompts.")
    PYTHON = ("python", "Python does it, several times slower: nothing was compiled.")
