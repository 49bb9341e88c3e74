"""The log on stderr, as text or as one JSON object per line."""

from __future__ import annotations

import datetime
import json
import logging
import sys

from pdconn.router.access.access_log import KeyValues

FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """One object per record: ``time`` (UTC), ``level``, ``logger``, ``message``.

    A traceback is in ``exception``; the fields of the access log are also separate keys.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line without its end."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        for argument in record.args if isinstance(record.args, tuple) else ():
            if isinstance(argument, KeyValues):
                line |= argument.fields
        return json.dumps(line)


def log_to_stderr(level: str, form: str) -> None:
    """Set up the process's log; ``form`` is one of ``FORMATS``."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # What neither format shows need not be looked up for each record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def fail(command: str, error: Exception, form: str) -> None:
    """Report why a command ends, in the format of the log."""
    if form == "json":
        logging.getLogger(command).error("pdconn: %s", error)
    else:
        print(f"{command}: {error}", file=sys.stderr)
