"""How a request ended, by what its engine answered.  Pure.

A status says whose failure an error is; of a stream the status that its error event names.  4xx is
the client's, with three exceptions: 429, with which an engine sheds load; 401 and 403 to a key that
the router sent in place of the client's; and 404 of an engine that has no such route, as one whose
URL is wrong.  501 is the client's too: it asked for what this engine cannot do.
"""

from __future__ import annotations

from pdconn.router.labels import RequestEnd
from pdconn.router.openai.answers import AnswerReader

_TOO_MANY = 429
_NOT_IMPLEMENTED = 501
_OF_THE_KEY = (401, 403)


def end_of(answer: AnswerReader, *, generates: bool, is_clients_key: bool) -> RequestEnd:
    """How a request ended of which the client has the whole answer.

    Args:
        answer: as far as it has passed.
        generates: it was sent to a route that every engine of a fleet serves.
        is_clients_key: the engine saw the client's key, and not the router's.
    """
    status = answer.status
    if status < 400 and answer.error is not None and (generates or answer.is_stream):
        status = answer.error  # elsewhere it may be what was asked for: a response that failed
    if status < 400:
        return RequestEnd.OK
    of_the_engine = status == _TOO_MANY or (status >= 500 and status != _NOT_IMPLEMENTED)
    wrong_key = status in _OF_THE_KEY and not is_clients_key
    if of_the_engine or wrong_key or (generates and answer.has_no_route):
        return RequestEnd.ENGINE_ERROR
    return RequestEnd.CLIENT_ERROR
