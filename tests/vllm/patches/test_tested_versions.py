"""vLLM's versions that pdconn was tested with start, and no others but by the user's word."""

from __future__ import annotations

import pytest

from pdconn.vllm.config import ConfigError
from pdconn.vllm.patches.tested_versions import check_version


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1+cpu", "0.33.0rc1"])
def test_versions_that_were_tested_start(version: str) -> None:
    check_version(version, is_allowed=False)


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "dev"])
def test_others_are_refused_unless_the_user_asks_for_them(version: str) -> None:
    with pytest.raises(ConfigError, match="untested_vllm"):
        check_version(version, is_allowed=False)
    check_version(version, is_allowed=True)
