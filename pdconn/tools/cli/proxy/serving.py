"""A router while it serves: progress on stdout, and signal handling."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress

from pdconn.router.proxy_config import ProxyConfig
from pdconn.router.router_errors import BadSetting
from pdconn.router.router_server import EngineReady, Running
from pdconn.sidechannel.security import is_loopback

log = logging.getLogger(__name__)


class Events:
    """Progress on stdout, as sentences or as JSON lines."""

    def __init__(self, command: str, as_json: bool) -> None:
        self._command = command
        self._as_json = as_json

    def emit(self, sentence: str, event: str, **facts: object) -> None:
        """Print one event."""
        line = json.dumps({"event": event, **facts}) if self._as_json else sentence
        print(line, flush=True)

    def wait_began(self, config: ProxyConfig) -> None:
        """Report that the wait for engines begins."""
        engines = list(dict.fromkeys(config.engines.prefill + config.engines.decode))
        engines += [] if config.engines.fleet is None else [config.engines.fleet]
        self.emit(
            f"waiting up to {config.times.wait_s:g} s for {', '.join(engines)}",
            "waiting",
            engines=engines,
            wait_s=config.times.wait_s,
        )

    def ready(self, one: EngineReady) -> None:
        """Report one more engine that answers."""
        self.emit(
            f"{one.engine} ready after {one.after_s:.1f} s ({one.num_ready} of {one.num_engines})",
            "engine_ready",
            engine=one.engine,
            after_s=round(one.after_s, 3),
        )

    def listening(self, proxy: Running) -> None:
        """Report that clients can connect."""
        config = proxy.config
        fleet = "" if config.engines.fleet is None else f"; fleet file {config.engines.fleet}"
        self.emit(
            f"{self._command} on {proxy.url} ({config.routing.policy}): "
            f"prefill by {', '.join(config.engines.prefill) or 'none'}; "
            f"decode by {', '.join(config.engines.decode) or 'none'}{fleet}; "
            f"admin pages and metrics on {proxy.admin_url}",
            "listening",
            url=proxy.url,
            admin_url=proxy.admin_url,
            policy=config.routing.policy,
            prefill=config.engines.prefill,
            decode=config.engines.decode,
            fleet=config.engines.fleet,
        )

    def draining(self, config: ProxyConfig) -> None:
        """Report that a signal has started the drain."""
        delay = f"{config.times.drain_delay_s:g} s until it stops listening, then "
        self.emit(
            f"stopping: {delay if config.times.drain_delay_s else ''}"
            f"requests have {config.times.drain_timeout_s:g} s to finish",
            "draining",
            drain_delay_s=config.times.drain_delay_s,
            drain_timeout_s=config.times.drain_timeout_s,
        )

    def reloaded(self, mistakes: tuple[BadSetting, ...]) -> None:
        """Report a reload, which skipped the settings with these mistakes."""
        texts = [str(mistake) for mistake in mistakes]
        self.emit(
            f"not reloaded: {'; '.join(texts)}; the rest was reloaded" if texts else "reloaded",
            "reload_failed" if texts else "reloaded",
            mistakes=texts,
        )


RunRouter = Callable[
    [ProxyConfig, Callable[[EngineReady], None]], AbstractAsyncContextManager[Running]
]
"""A router that serves while a block runs."""


async def serve(config: ProxyConfig, events: Events, running: RunRouter) -> int:
    """Serve until a signal; returns the exit code.

    Raises:
        BadSetting, CannotListen, EnginesMissing: the router cannot serve.
    """
    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in a task
    _on_first_signal(task.cancel)
    hung_up = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up.set)
    _warn_of_exposure(config)
    if config.times.wait_s is not None:
        events.wait_began(config)
    try:
        async with running(config, events.ready) as proxy:
            stop = asyncio.Event()
            _on_first_signal(stop.set)
            events.listening(proxy)
            reloading = asyncio.create_task(_reload_on(hung_up, proxy, events))
            await stop.wait()
            reloading.cancel()
            with suppress(asyncio.CancelledError):
                await reloading
            events.draining(config)
    except asyncio.CancelledError:
        pass  # stopped before listening: there is nothing to drain
    return 0


async def _reload_on(hung_up: asyncio.Event, proxy: Running, events: Events) -> None:
    while True:
        await hung_up.wait()
        hung_up.clear()
        try:
            events.reloaded(await proxy.reload())
        except Exception:  # the outermost loop: the next signal is handled too
            log.exception("pdconn: reloading failed")


def _warn_of_exposure(config: ProxyConfig) -> None:
    """Log which protections are missing on a listener that other hosts can reach."""
    missing = [
        option
        for option, value in (
            ("--api-key-file", config.listen.api_key_file),
            ("--tls-cert", config.listen.tls_cert),
        )
        if value is None
    ]
    if missing and not is_loopback(config.listen.host):
        log.warning(
            "pdconn: listening beyond loopback without %s host=%s",
            " and ".join(missing),
            config.listen.host,
        )
    if not is_loopback(config.listen.admin_host):
        log.warning(
            "pdconn: the admin pages are open to every host that reaches them; "
            "they have neither key nor TLS admin_host=%s",
            config.listen.admin_host,
        )


def _on_first_signal(act: Callable[[], object]) -> None:
    """Call ``act`` on the first SIGTERM or SIGINT; the next one ends the process at once."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def once() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)
            # Python's own handler of SIGINT would drain to the end.
            signal.signal(number, signal.SIG_DFL)
        act()

    for number in numbers:
        loop.add_signal_handler(number, once)
