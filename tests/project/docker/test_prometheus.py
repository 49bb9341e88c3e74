"""Prometheus' own checker reads the configuration and the alerts of ``docker/``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.project.docker.stack import DOCKER

PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not there: Debian's package prometheus has it"
)


def checked(directory: Path) -> tuple[bool, str]:
    """Whether promtool takes the configuration there, and what it says."""
    words = [str(PROMTOOL), "check", "config", str(directory / "prometheus.yml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_configuration_and_every_alert() -> None:
    taken, said = checked(DOCKER)
    assert taken, said
    assert "1 rule files found" in said
    num_alerts = (DOCKER / "alerts.yml").read_text().count("- alert: ")
    assert f"{num_alerts} rules found" in said


@needs_promtool
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("prometheus.yml", "scrape_interval", "scrape_intervall"),
        ("prometheus.yml", "alerts.yml", "alert.yml"),
        ("alerts.yml", "sum by (job, instance) (rate(", "sum by (job, instance) (rat("),
        ("alerts.yml", "for: 1m", "for: soon"),
    ],
)
def test_a_file_with_a_fault_is_refused(tmp_path: Path, name: str, old: str, new: str) -> None:
    for each in ("prometheus.yml", "alerts.yml"):
        shutil.copy(DOCKER / each, tmp_path)
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    assert not checked(tmp_path)[0]
