"""pdconn: a prefill-to-decode KV cache connector for vLLM, made for hybrid models.

``transport`` and ``registration`` are general names that another distribution
could own.  Importing pdconn checks that the two found first on the path are the
ones it was installed with, and says which path is foreign when they are not.
"""

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"

_HOME = Path(__file__).resolve().parent.parent


class ForeignPackage(ImportError):
    """Another distribution's package shadows one of ours."""


def _check_siblings() -> None:
    for name in ("transport", "registration"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise ForeignPackage(
                f"pdconn needs its own package '{name}' beside it in {_HOME}, and found none"
            )
        found = Path(spec.origin).resolve().parent
        if found != _HOME / name:
            raise ForeignPackage(
                f"package '{name}' is foreign: found {found}, expected {_HOME / name}. "
                f"Another distribution shadows it; install pdconn into its own environment "
                f"or put {_HOME} first on the path."
            )


_check_siblings()
