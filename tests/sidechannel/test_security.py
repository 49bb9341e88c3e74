"""Laws of settings that guard the side channel: checked when read, and never shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pdconn.lender.server import Lender
from pdconn.protocol.auth import Secret
from pdconn.protocol.messages import RankGeometry, Welcome
from pdconn.sidechannel.connection import Unauthenticated
from pdconn.sidechannel.credentials import load_secret, secret_of
from pdconn.sidechannel.describe import describe
from pdconn.sidechannel.security import (
    NoHostName,
    Security,
    SecurityError,
    TlsFiles,
    Unprotected,
    is_loopback,
)
from pdconn.tools.cli.main import main
from pdconn.vllm.config import ConfigError, read_settings
from registration.references import AttentionKind, GroupMemory, build_kv_cache_references
from tests.fakes.credentials import FOREIGN, OPEN, OTHER, SECRET, SHARED, Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


@pytest.fixture
def files(authority: Authority) -> TlsFiles:
    return authority.sign("engine", "localhost", "127.0.0.1")


def written(path: Path, data: bytes, mode: int = 0o600) -> str:
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def knows(secret: Secret | None, value: bytes) -> bool:
    """Whether ``secret`` is ``value``."""
    assert secret is not None
    nonces = (bytes(32), bytes(32))
    return secret.session(*nonces, "") == Secret(value).session(*nonces, "")


# Where nothing guards


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "LocalHost"])
def test_loopback_needs_no_guard(host: str) -> None:
    assert is_loopback(host)
    OPEN.require(host)


@pytest.mark.parametrize(
    "host",
    ["10.0.0.1", "0.0.0.0", "::", "::2", "prefill-0", "localhost.evil.example", "127.0.0.1.nip.io",
     "128.0.0.1", "", "127.1", "::ffff:10.0.0.1", "ip6-localhost"],
)  # fmt: skip
def test_anywhere_else_one_of_three_ways_out_is_needed(host: str, files: TlsFiles) -> None:
    with pytest.raises(Unprotected) as refused:
        OPEN.require(host)
    for way in ("secret_file", "PDCONN_SECRET", "tls_cert, tls_key and tls_ca", '"insecure": true'):
        assert way in str(refused.value)
    for security in (SHARED, Security(tls=files), Security(insecure=True)):
        security.require(host)


def test_insecure_allows_unauthenticated_peers_and_does_not_turn_a_guard_off() -> None:
    assert Security(insecure=True).for_lender() is None
    assert Security(SHARED.secret, insecure=True).for_lender() is not None
    assert OPEN.for_reader("localhost") is None


# Secrets


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o440])
def test_a_secret_is_read_without_its_newline(tmp_path: Path, mode: int) -> None:
    assert knows(load_secret(written(tmp_path / "s", SECRET + b"\n", mode)), SECRET)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o666])
def test_a_secret_that_everybody_may_read_is_refused_by_its_mode(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "s", SECRET, mode)
    with pytest.raises(SecurityError, match=f"mode 0{mode:o} of {path}"):
        load_secret(path)


@pytest.mark.parametrize("mode", [0o620, 0o660, 0o602, 0o622])
def test_a_secret_that_others_may_write_is_refused_by_its_mode(tmp_path: Path, mode: int) -> None:
    """Another user could put a secret there that he knows.  Without the fix it is taken."""
    path = written(tmp_path / "s", SECRET, mode)
    with pytest.raises(
        SecurityError, match=f"only its owner can write .* mode 0{mode:o} of {path}"
    ):
        load_secret(path)


def test_a_tls_key_that_others_may_write_is_refused(files: TlsFiles) -> None:
    Security(tls=files)  # the control
    Path(files.key).chmod(0o620)
    with pytest.raises(
        SecurityError, match="tls_key: expected a file that only its owner can write"
    ):
        Security(tls=files)


@pytest.mark.parametrize("data", [b"", b"\n", SECRET[:15], SECRET[:15] + b"\n"])
def test_a_short_secret_is_refused_by_its_length(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SecurityError, match="secret_file: expected at least 16 bytes in") as error:
        load_secret(written(tmp_path / "s", data))
    assert SECRET[:15].decode() not in str(error.value)


def test_a_secret_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(
            SecurityError, match=f"secret_file: expected a readable file, got {path}"
        ):
            load_secret(str(path))


def test_the_setting_wins_over_the_environment_which_may_name_one_secret(tmp_path: Path) -> None:
    ours, theirs = written(tmp_path / "a", SECRET), written(tmp_path / "b", OTHER)
    text = {"PDCONN_SECRET": OTHER.decode()}
    named = {"PDCONN_SECRET_FILE": theirs}
    assert secret_of(None, {}) is None
    assert knows(secret_of(None, text), OTHER)
    assert knows(secret_of(None, named), OTHER)
    assert knows(secret_of(ours, text | named), SECRET)
    with pytest.raises(SecurityError, match="PDCONN_SECRET: expected it or PDCONN_SECRET_FILE"):
        secret_of(None, text | named)


def test_an_empty_variable_is_an_error_and_not_no_secret() -> None:
    with pytest.raises(SecurityError, match="PDCONN_SECRET: expected at least 16 bytes"):
        secret_of(None, {"PDCONN_SECRET": ""})
    with pytest.raises(SecurityError, match="PDCONN_SECRET_FILE: expected a readable file"):
        secret_of(None, {"PDCONN_SECRET_FILE": ""})


# TLS files


def test_tls_files_come_together() -> None:
    assert TlsFiles.from_paths(None, None, None) is None
    with pytest.raises(SecurityError, match=r"tls_key: .* together, got only tls_cert and tls_ca"):
        TlsFiles.from_paths("a", None, "b")


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_tls_file_that_is_wrong_is_named(files: TlsFiles, tmp_path: Path, which: str) -> None:
    Security(tls=files)  # the control
    for path in (str(tmp_path / "nothing"), written(tmp_path / "other", b"no PEM")):
        with pytest.raises(SecurityError, match=f"tls_{which}: expected .*{path}"):
            Security(tls=replace(files, **{which: path}))


@pytest.mark.parametrize("which", ["cert", "ca"])
def test_a_damaged_certificate_is_named(files: TlsFiles, tmp_path: Path, which: str) -> None:
    damaged = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    path = written(tmp_path / "bad", damaged)
    with pytest.raises(SecurityError, match=f"tls_{which}.*{path}"):
        Security(tls=replace(files, **{which: path}))


def test_the_key_of_another_certificate_is_named(authority: Authority, files: TlsFiles) -> None:
    other = authority.sign("other", "localhost")
    with pytest.raises(SecurityError, match=f"tls_key: expected the key of tls_cert {files.cert}"):
        Security(tls=replace(files, key=other.key))


def test_a_key_that_everybody_may_read_is_refused_by_its_mode(files: TlsFiles) -> None:
    Path(files.key).chmod(0o644)
    with pytest.raises(SecurityError, match=r"tls_key: .* got mode 0644"):
        Security(tls=files)


def test_a_key_with_a_passphrase_is_refused_without_a_prompt(
    files: TlsFiles, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization as pem

    key = pem.load_pem_private_key(Path(files.key).read_bytes(), None)
    locked = key.private_bytes(
        pem.Encoding.PEM, pem.PrivateFormat.PKCS8, pem.BestAvailableEncryption(b"phrase")
    )
    path = written(tmp_path / "locked", locked)
    with pytest.raises(SecurityError, match="tls_key: expected a key without passphrase"):
        Security(tls=replace(files, key=path))


def test_a_host_that_no_certificate_could_name_is_an_oserror(files: TlsFiles) -> None:
    for host in ("", "a..b", ".a", "a\0b", "x" * 300):
        with pytest.raises(NoHostName, match="host: expected a name") as error:
            Security(tls=files).for_reader(host)
        assert isinstance(error.value, OSError)
    assert Security(tls=files).for_reader("prefill-0") is not None


# Settings


def settings_of(environ: dict[str, str] | None = None, **extra: Any) -> Security:
    return read_settings(extra, "127.0.0.1", 5600, 0, environ or {}).security


def test_settings_give_the_guard(tmp_path: Path, files: TlsFiles) -> None:
    assert settings_of() == OPEN
    path = written(tmp_path / "s", SECRET)
    assert knows(settings_of(secret_file=path).secret, SECRET)
    assert knows(settings_of({"PDCONN_SECRET": SECRET.decode()}).secret, SECRET)
    tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}
    assert settings_of(**tls) == Security(tls=files)
    assert not settings_of(**tls, tls_check_hostname=False).check_hostname
    assert settings_of(insecure=True).insecure


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"secret": "x"}, "a known key, got 'secret'; configs are logged, so put it in a file"),
        ({"secret_fil": "x"}, "a known key, got 'secret_fil'; did you mean 'secret_file'"),
        ({"security": {}}, "a known key, got 'security'"),
        ({"secret_file": 3}, "secret_file: expected text, got 3"),
        ({"secret_file": "/none/such"}, "secret_file: expected a readable file, got /none/such"),
        ({"tls_cert": "/none/such"}, "tls_key: expected tls_cert, tls_key and tls_ca together"),
        ({"insecure": 1}, "insecure: expected true or false, got 1"),
        ({"tls_check_hostname": "no"}, "tls_check_hostname: expected true or false"),
    ],
)
def test_a_wrong_setting_names_key_expected_and_seen(extra: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_of(**extra)


def test_settings_do_not_show_the_secret(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"PDCONN_SECRET": SECRET.decode()}
    settings = read_settings({}, "127.0.0.1", 5600, 0, environ)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("pdconn").info("%s %r", settings, settings.security)
    shown = [caplog.text, str(settings), repr(settings.security), str(asdict(settings.security))]
    assert all(SECRET.decode() not in text for text in shown)
    assert "secret=Secret(...)" in caplog.text  # the control: it was looked at


# pdconn diff


def welcome() -> Welcome:
    group = GroupMemory(AttentionKind.FULL, None, 4, ())
    references = build_kv_cache_references([group])
    return Welcome.in_our_version(
        "e", "boot", {"model": "m"}, (RankGeometry(0, 0, b"here", references),)
    )


@contextmanager
def lending(security: Security) -> Iterator[int]:
    lender = Lender(welcome(), "127.0.0.1", 0, security=security)
    try:
        yield lender.port
    finally:
        lender.close()


def test_a_guarded_lender_describes_itself_to_a_peer_that_is_guarded_alike(files: TlsFiles) -> None:
    for security in (SHARED, Security(tls=files), Security(SHARED.secret, files), OPEN):
        with lending(security) as port:
            assert describe("127.0.0.1", port, 5.0, security).engine_id == "e"


def test_a_guarded_lender_describes_itself_to_no_other(files: TlsFiles) -> None:
    tls = Security(tls=files)
    for ours, theirs in ((OPEN, SHARED), (FOREIGN, SHARED), (OPEN, tls), (SHARED, tls)):
        with lending(theirs) as port, pytest.raises(Unauthenticated):
            describe("127.0.0.1", port, 5.0, ours)


def test_diff_reads_a_secret_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ["--save", str(tmp_path / "saved.json")]
    path = written(tmp_path / "s", SECRET)
    with lending(SHARED) as port:
        where = ["diff", f"127.0.0.1:{port}", *saved]
        assert main([*where, "--secret-file", path]) == 0
        assert main(where) == 2
        assert "does it require a secret or TLS that we do not have?" in capsys.readouterr().err
        monkeypatch.setenv("PDCONN_SECRET", SECRET.decode())
        assert main(where) == 0
        monkeypatch.setenv("PDCONN_SECRET", OTHER.decode())
        assert main(where) == 2
        text = capsys.readouterr().err
        assert "the secrets probably differ" in text
        assert OTHER.decode() not in text


def test_diff_shows_a_certificate(files: TlsFiles, tmp_path: Path) -> None:
    options = ["--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca]
    saved = ["--save", str(tmp_path / "saved.json")]
    with lending(Security(tls=files)) as port:
        assert main(["diff", f"127.0.0.1:{port}", *saved, *options]) == 0
        assert main(["diff", f"127.0.0.1:{port}", *saved]) == 2
        assert main(["diff", f"127.0.0.1:{port}", *saved, *options[:4]]) == 2
