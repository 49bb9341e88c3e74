"""Keys and TLS of clients: which requests are accepted, and what engines see of the key."""

from __future__ import annotations

import asyncio
import hmac
import logging
import ssl
from pathlib import Path

import aiohttp
import pytest

from pdconn.router.access.api_keys import ApiKeys
from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting
from pdconn.router.router_server import running_proxy
from pdconn.tools.cli.proxy.serving import _warn_of_exposure
from tests.fakes.credentials import Authority
from tests.fakes.deployment import deployment
from tests.fakes.event_loop import in_loop
from tests.fakes.fake_engine import ANSWER

KEY, OTHER = "sk-one", "sk-two"
BODY = {"model": "m", "prompt": "hi"}
URLS = (["http://p:1"], ["http://d:1"])


def key_file(folder: Path, text: str = f"# ours\n{KEY}\n\n  {OTHER}  \n", mode: int = 0o600) -> str:
    path = folder / "keys.txt"
    path.touch(0o600)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        (f"Bearer {KEY}x", 401),
        (f"Bearer {KEY[:-1]}", 401),
        (f"Basic {KEY}", 401),
        (KEY, 401),
        ("Bearer # ours", 401),
        (f"Bearer {KEY}", 200),
        (f"bearer {OTHER}", 200),
    ],
)
@in_loop
async def test_who_has_no_key_is_refused(tmp_path, authorization, status):
    """Without keys every host that reaches the proxy uses the engines."""
    async with deployment(api_key_file=key_file(tmp_path)) as d:
        headers = {} if authorization is None else {"Authorization": authorization}
        async with d.client.post(d.url("/v1/completions"), json=BODY, headers=headers) as reply:
            assert reply.status == status
            text = await reply.text()
        if status == 401:
            assert reply.headers["WWW-Authenticate"] == "Bearer"
            assert '"code":401' in text
            assert KEY not in text
            assert not d.prefill[0].seen
        for path in ("/v1/models", "/nowhere"):
            assert (await d.send(path, method="GET")).status == 401
        for path in ("/livez", "/readyz", "/health"):  # orchestrators have no key
            assert (await d.send(d.proxy.url + path, method="GET")).status == 200


@pytest.mark.parametrize(
    ("settings", "passed"),
    [({}, False), ({"forward_authorization": True}, True)],
)
@in_loop
async def test_the_key_does_not_reach_engines_unless_it_is_forwarded(tmp_path, settings, passed):
    """A key that engines see is in their logs, and its operator has it."""
    async with deployment(api_key_file=key_file(tmp_path), **settings) as d:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with d.client.post(d.url("/v1/completions"), json=BODY, headers=headers) as reply:
            assert reply.status == 200
        seen = [*d.prefill[0].seen, *d.decode[0].seen]
        assert len(seen) == 2
        assert [f"Bearer {KEY}" in request.headers.values() for request in seen] == [passed] * 2


@in_loop
async def test_without_keys_of_ours_the_engines_keys_pass_as_ever():
    async with deployment() as d:
        headers = {"Authorization": "Bearer the-engines"}
        async with d.client.post(d.url("/v1/completions"), json=BODY, headers=headers) as reply:
            assert await reply.read() == ANSWER
        for request in (*d.prefill[0].seen, *d.decode[0].seen):
            assert request.headers["Authorization"] == "Bearer the-engines"


def test_every_key_is_compared_whole_whichever_is_right(tmp_path, monkeypatch):
    """Otherwise timing reveals a key's place, or how much of a guess was right."""
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def noting(one: bytes, two: bytes) -> bool:
        compared.append((len(one), len(two)))
        return compare(one, two)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    keys = ApiKeys(key_file(tmp_path))
    for guess in (KEY, OTHER, "x", "x" * 1000, ""):
        compared.clear()
        assert keys.allow(f"Bearer {guess}") == (guess in (KEY, OTHER))
        assert compared == [(32, 32)] * 2


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0o600, "a readable file"),
        ("", 0o600, "1 to 1024 keys"),
        ("# none\n\n", 0o600, "got '0 keys'"),
        ("a b\n", 0o600, "key 1"),
        ("good\nbäd\n", 0o600, "key 2"),
        (KEY, 0o604, "mode 0604"),
    ],
)
def test_a_key_file_that_makes_no_sense_names_its_option(tmp_path, text, mode, message):
    path = str(tmp_path / "gone") if text is None else key_file(tmp_path, text, mode)
    with pytest.raises(BadSetting, match=r"^--api-key-file: ") as caught:
        ApiKeys(path)
    assert message in str(caught.value)
    assert path in str(caught.value) or "0 keys" in message


def test_an_option_that_needs_another_names_it():
    for settings, option in (
        ({"tls_cert": "x"}, "--tls-key"),
        ({"tls_key": "x"}, "--tls-cert"),
        ({"forward_authorization": True}, "--forward-authorization"),
        ({"port": 8000, "admin_port": 8000}, "--admin-port"),
    ):
        with pytest.raises(BadSetting) as caught:
            ProxyConfig.from_options(*URLS, **settings)
        assert caught.value.field == option


# TLS


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.file)


async def shown_to(url: str, authority: Authority) -> int:
    """The serial number of the certificate that a client which trusts ``authority`` sees."""
    _, writer = await asyncio.open_connection(
        "127.0.0.1", int(url.rsplit(":", 1)[1]), ssl=trusting(authority)
    )
    shown = int(writer.get_extra_info("peercert")["serialNumber"], 16)
    writer.close()
    await writer.wait_closed()
    return shown


@in_loop
async def test_clients_connect_by_tls_and_not_otherwise(tmp_path):
    authority = Authority(tmp_path / "ca")
    stranger = Authority(tmp_path / "other")
    files = authority.sign("proxy", "127.0.0.1")
    async with deployment(tls_cert=files.cert, tls_key=files.key) as d:
        assert d.proxy.url.startswith("https://127.0.0.1:")
        async with d.client.post(
            d.url("/v1/completions"), json=BODY, ssl=trusting(authority)
        ) as reply:
            assert await reply.read() == ANSWER
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await d.client.get(d.proxy.url + "/livez", ssl=trusting(stranger))
        with pytest.raises(aiohttp.ClientError):
            await d.client.get(d.proxy.url.replace("https", "http") + "/livez")
        assert (await d.send("/metrics", method="GET")).status == 200  # the admin pages have none


@pytest.mark.parametrize("rsa", [False, True], ids=["ECDSA", "RSA"])
@in_loop
async def test_a_reload_takes_new_files_and_keeps_the_old_of_bad_ones(tmp_path, rsa):
    """Without it a new key or certificate needs a restart, which ends every stream.

    OpenSSL keeps one certificate for each type of key, so a new type must not add to the old.
    """
    authority = Authority(tmp_path / "ca")
    files = authority.sign("proxy", "127.0.0.1")
    keys = key_file(tmp_path)
    config = ProxyConfig.from_options(
        *URLS, port=0, api_key_file=keys, tls_cert=files.cert, tls_key=files.key
    )
    async with running_proxy(config) as proxy, aiohttp.ClientSession() as client:

        async def status_of(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with client.get(
                f"{proxy.url}/nowhere", headers=headers, ssl=trusting(authority)
            ) as reply:
                return reply.status

        before = await shown_to(proxy.url, authority)
        assert [await status_of(KEY), await status_of("sk-new")] == [404, 401]
        authority.sign("proxy", "127.0.0.1", rsa=rsa)  # over the same files
        Path(keys).write_text("sk-new\n", encoding="utf-8")
        assert await shown_to(proxy.url, authority) == before
        assert await proxy.reload() == ()
        after = await shown_to(proxy.url, authority)
        assert after != before
        assert [await status_of(KEY), await status_of("sk-new")] == [401, 404]
        Path(keys).write_text("", encoding="utf-8")
        Path(files.key).write_text("no key", encoding="utf-8")
        mistakes = await proxy.reload()
        assert [mistake.field for mistake in mistakes] == ["--api-key-file", "--tls-cert"]
        assert await shown_to(proxy.url, authority) == after
        assert await status_of("sk-new") == 404


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: Path(files.cert).unlink(), "--tls-cert: expected a readable file"),
        (lambda files: Path(files.key).unlink(), "--tls-key: expected a readable file"),
        (lambda files: Path(files.key).chmod(0o644), "--tls-key: .*mode 0644"),
        (
            lambda files: Path(files.cert).write_text("x", encoding="utf-8"),
            "--tls-cert: expected a certificate",
        ),
    ],
)
def test_a_bad_certificate_names_its_option(tmp_path, change, message):
    files = Authority(tmp_path / "ca").sign("proxy", "127.0.0.1")
    config = ProxyConfig.from_options(*URLS, tls_cert=files.cert, tls_key=files.key)
    assert config.listen.make_tls() is not None
    change(files)
    with pytest.raises(BadSetting, match=message):
        config.listen.make_tls()


def test_a_key_of_another_certificate_is_refused(tmp_path):
    authority = Authority(tmp_path / "ca")
    one, two = authority.sign("one", "127.0.0.1"), authority.sign("two", "127.0.0.1")
    with pytest.raises(BadSetting, match=f"--tls-key: expected the key of {one.cert}"):
        ProxyConfig.from_options(*URLS, tls_cert=one.cert, tls_key=two.key).listen.make_tls()


# The warning


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, []),
        ({"host": "localhost"}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0"}, ["without --api-key-file and --tls-cert host=0.0.0.0"]),
        ({"host": "10.0.0.1", "api_key_file": "k"}, ["without --tls-cert host"]),
        ({"host": "a-name", "tls_cert": "c", "tls_key": "k"}, ["without --api-key-file host"]),
        ({"host": "0.0.0.0", "api_key_file": "k", "tls_cert": "c", "tls_key": "k"}, []),
        ({"admin_host": "0.0.0.0"}, ["admin_host=0.0.0.0"]),
    ],
)
def test_a_listener_that_others_reach_unprotected_is_warned_of(settings, warned, caplog):
    _warn_of_exposure(ProxyConfig.from_options(*URLS, **settings))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(warned)
    assert all(words in line for words, line in zip(warned, lines, strict=True))
    assert all(record.levelno == logging.WARNING for record in caplog.records)
