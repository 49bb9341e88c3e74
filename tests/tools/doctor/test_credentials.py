"""Secret and TLS files, tried as both sides of a side channel use them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdconn.sidechannel.security import TlsFiles
from pdconn.tools.doctor.local.credential_files import (
    SOON_S,
    CredentialFacts,
    judge_credentials,
    read_credentials,
    seen_credentials,
)
from tests.fakes.credentials import SECRET, Authority


def facts_of(files: TlsFiles, ca: str | None = None) -> CredentialFacts:
    tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": ca or files.ca}
    return read_credentials(None, tls, {})


def found(facts: CredentialFacts, **more: object) -> list[str]:
    return [finding.id for finding in judge_credentials(facts, **more)]  # type: ignore[arg-type]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


def test_a_certificate_that_is_right_has_no_finding_and_is_described(authority: Authority) -> None:
    facts = facts_of(authority.sign("ours", "p0.example", "10.0.0.1"))
    assert facts.handshake is None
    assert found(facts, listens_at="10.0.0.1", named="10.0.0.1") == []
    assert facts.ends_at is not None
    seen = seen_credentials(facts, facts.ends_at - 86400 * 30)
    assert (
        seen == "no secret and TLS with a certificate for p0.example, 10.0.0.1 that ends in 30 days"
    )


def test_a_certificate_that_ends_soon_is_a_warning(authority: Authority) -> None:
    facts = facts_of(authority.sign("ours", "p0.example"))
    assert facts.ends_at is not None
    assert found(facts, now=facts.ends_at - SOON_S - 60) == []
    assert found(facts, now=facts.ends_at - SOON_S + 60) == ["credentials.tls-ends"]


def test_a_certificate_of_another_ca_is_found(authority: Authority, tmp_path: Path) -> None:
    files = authority.sign("ours", "p0.example")
    foreign = Authority(tmp_path / "foreign")
    facts = facts_of(files, foreign.file)
    assert found(facts) == ["credentials.tls"]
    assert facts_of(files).handshake is None  # the control


def test_a_wildcard_covers_one_label(authority: Authority) -> None:
    facts = facts_of(authority.sign("ours", "*.prefill.example"))
    assert found(facts, named="p0.prefill.example") == []
    assert found(facts, named="a.p0.prefill.example") == ["credentials.tls-host"]
    assert found(facts, named="prefill.example") == ["credentials.tls-host"]
    assert found(facts, named=None) == []  # not known


def test_a_side_channel_off_loopback_needs_a_protection(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    nothing = read_credentials(None, {}, {})
    assert found(nothing, listens_at="127.0.0.1") == []
    assert found(nothing, listens_at="10.0.0.1") == ["credentials.none"]
    assert found(nothing, listens_at=None) == []
    for guarded in (
        read_credentials(str(secret), {}, {}),
        read_credentials(None, {}, {"PDCONN_SECRET": SECRET.decode()}),
    ):
        assert found(guarded, listens_at="10.0.0.1") == []


def test_no_secret_is_shown(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o644)
    facts = read_credentials(str(secret), {}, {})
    shown = [finding.message for finding in judge_credentials(facts)]
    assert len(shown) == 1
    assert SECRET.decode() not in shown[0] + seen_credentials(facts, 0.0)
