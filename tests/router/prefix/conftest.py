"""The index in Python and compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdconn.router.prefix.compiled import extension

COMPILED = extension.module


@pytest.fixture(params=["python", "compiled"], scope="module")
def in_both(request: pytest.FixtureRequest) -> Iterator[None]:
    """What uses it runs with each; ``test_compiled.py`` tests that both are there."""
    if request.param == "compiled" and COMPILED is None:
        pytest.skip(extension.why_not)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "module", COMPILED if request.param == "compiled" else None)
        yield
