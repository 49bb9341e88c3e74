"""The fleet of ``docker/compose.yaml``, brought up by Compose, and what is done to its containers.

Compose reads the files of ``docker/`` as they are, from a copy: the secret there is made for the
run.  The project has a name of its own, so that no container or volume of yours is touched.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.project.docker.debian import DockerFailed, Say, compose_command, run
from tests.project.docker.stack import DOCKER, load

PROJECT = "pdconn-check"
ALONE = "alone"
MODEL = "tiny"
"""What engines call the model that they serve."""
START_TIMEOUT_S = 600.0

_HTTP, _ADMIN = 8000, 9000
_USER = 10001
_KV_OPTIONS = ("--kv-events-config", "--kv-transfer-config")
_CARDS = (
    "cd /sys/class/net; for card in *; do echo $card $(cat $card/address"
    " $card/statistics/rx_bytes $card/statistics/tx_bytes); done"
)


class NotInTime(Exception):
    """What was waited for did not come about; says what."""


@dataclass(frozen=True)
class Card:
    """A container's network card, and the bytes that it has carried."""

    name: str
    received: int
    sent: int


def until(true: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    """Wait until ``true`` says so.

    Raises:
        NotInTime: it did not.
    """
    give_up = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > give_up:
            raise NotInTime(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.5)


class Fleet:
    """The containers of one project.  Services are named as in ``compose.yaml``."""

    def __init__(self, directory: Path, compose: Sequence[str]) -> None:
        self.directory = directory
        self.stack = load("compose.yaml")
        self._compose = compose
        self._files = ["compose.yaml"]

    def compose(self, *words: str, timeout_s: float = 600.0) -> str:
        """Run Compose on this project."""
        files = [word for name in self._files for word in ("-f", name)]
        command = [*self._compose, *files, "-p", PROJECT, *words]
        return run(command, timeout_s, cwd=self.directory)

    def add(self, services: Mapping[str, Any]) -> None:
        """Start services that ``compose.yaml`` has not, on its networks and volumes."""
        name = f"{'-'.join(services)}.yaml"
        (self.directory / name).write_text(yaml.safe_dump({"services": dict(services)}))
        self._files.append(name)
        self.compose("up", "--detach", "--no-build", "--no-deps", *services)

    def container(self, service: str) -> str:
        """The id of a service's container, running or not."""
        labels = {"project": PROJECT, "service": service}
        words = [f"--filter=label=com.docker.compose.{key}={labels[key]}" for key in labels]
        found = run(["docker", "ps", "--all", "--quiet", "--no-trunc", *words]).split()
        if len(found) != 1:
            raise DockerFailed(f"{service}: {len(found)} containers, expected one")
        return found[0]

    def do(self, verb: str, service: str, *options: str) -> None:
        """``docker VERB``: kill, start, stop, restart, pause, unpause."""
        run(["docker", verb, *options, self.container(service)])

    def inspect(self, service: str) -> dict[str, Any]:
        """All that Docker knows of a service's container."""
        return dict(json.loads(run(["docker", "inspect", self.container(service)]))[0])

    def healthy(self, service: str) -> bool:
        """Whether it runs and its health check passes.

        Raises:
            DockerFailed: it has ended, or started more than once; with its log's end.
        """
        seen = self.inspect(service)
        if seen["State"]["Status"] == "exited" or seen["RestartCount"]:
            raise DockerFailed(f"{service} has ended: {self.log(service)[-3000:]}")
        return bool(seen["State"]["Health"]["Status"] == "healthy")

    def await_healthy(self, *services: str) -> None:
        """Until all of them are healthy.

        Raises:
            NotInTime, DockerFailed: one is not, or has ended.
        """
        for service in services:
            until(lambda name=service: self.healthy(name), f"{service} healthy", START_TIMEOUT_S)  # type: ignore[misc]

    def log(self, service: str) -> str:
        """What a container has written."""
        name = self.container(service)
        return run(["bash", "-c", f"docker logs {shlex.quote(name)} 2>&1"])

    def address(self, service: str) -> str:
        """Its address on the network ``serving``."""
        files = [yaml.safe_load((self.directory / name).read_text()) for name in self._files]
        *_, last = (file["services"][service] for file in files if service in file["services"])
        return str(last["networks"]["serving"]["ipv4_address"])

    def url(self, service: str) -> str:
        """Where it serves, as this machine reaches it over the network's bridge."""
        return f"http://{self.address(service)}:{_HTTP}"

    def pages(self) -> str:
        """The router's admin pages."""
        return f"http://{self.address('router')}:{_ADMIN}"

    def cards(self, service: str) -> dict[str, Card]:
        """Network -> the container's card on it."""
        attached = self.inspect(service)["NetworkSettings"]["Networks"]
        names = {
            one["MacAddress"]: name.removeprefix(f"{PROJECT}_") for name, one in attached.items()
        }
        text = run(["docker", "exec", self.container(service), "sh", "-c", _CARDS])
        rows = [line.split() for line in text.splitlines()]
        return {
            names[address]: Card(card, int(received), int(sent))
            for card, address, received, sent in rows
            if address in names
        }

    def drain(self, service: str, draining: bool = True) -> None:
        """Tell the router, by its file, to give an engine nothing new, or to use it again."""
        path = self.directory / "fleet/fleet.toml"
        before, url, after = path.read_text(encoding="utf-8").partition(
            f'"http://{service}:8000"\n'
        )
        after = after.removeprefix("draining = true\n")
        text = before + url + ("draining = true\n" if draining else "") + after
        new = path.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(path)  # a half-written file is never there to be read

    def unplug(self, service: str, network: str) -> None:
        """Take a network away from a container."""
        run(["docker", "network", "disconnect", f"{PROJECT}_{network}", self.container(service)])

    def plug(self, service: str, network: str) -> None:
        """Give it back, with the address that it had."""
        address = self.stack.services[service]["networks"][network]["ipv4_address"]
        words = ["docker", "network", "connect", "--ip", address, f"{PROJECT}_{network}"]
        run([*words, self.container(service)])


def variant(
    service: Mapping[str, Any],
    serving: str,
    kv: str | None,
    environment: Mapping[str, str | None] = {},
    **extra: Any,
) -> dict[str, Any]:
    """A service like ``service`` at other addresses, with more in its connector's configuration.

    Without ``kv`` it is an engine without connector, which computes all it answers.  A variable
    whose value is None is taken away.
    """
    made = copy.deepcopy(dict(service))
    made["networks"] = {"serving": {"ipv4_address": serving}}
    made.pop("depends_on")  # the model is there by now
    variables = {**made["environment"], "VLLM_HOST_IP": serving, **environment}
    made["environment"] = {key: value for key, value in variables.items() if value is not None}
    if kv is None:
        made["command"] = [word for word in made["command"] if not word.startswith(_KV_OPTIONS)]
        return made
    made["networks"]["kv"] = {"ipv4_address": kv}
    made["command"] = [_with_extra(word, extra) for word in made["command"]]
    return made


def _with_extra(word: str, extra: Mapping[str, Any]) -> str:
    option, _, value = word.partition("=")
    if option != "--kv-transfer-config":
        return word
    transfer = json.loads(value)
    transfer["kv_connector_extra_config"] |= extra
    return f"{option}={json.dumps(transfer)}"


@contextmanager
def fleet(directory: Path, say: Say) -> Iterator[Fleet]:
    """Bring the fleet up, and one engine alone beside it; remove all but the images at the end.

    Raises:
        DockerFailed, NotInTime: nothing is left then.
    """
    compose = shlex.split(os.environ.get("PDCONN_COMPOSE", "")) or compose_command()
    if compose is None:
        raise DockerFailed("there is no Compose: install docker-compose")
    # A time limit of CI ends this process by SIGTERM: remove the containers then, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    made = Fleet(_copy(directory), compose)
    made.compose("down", "--volumes", "--remove-orphans")  # of a run that was killed
    try:
        say(f"starting {PROJECT}: {' '.join(compose)}, docker/compose.yaml")
        made.compose("up", "--detach", "--no-build")
        made.add({ALONE: variant(made.stack.services["p1"], "172.30.0.40", None)})
        made.await_healthy(*made.stack.engines(), "router", ALONE)
        yield made
    finally:
        _keep_logs(made)
        say("removing containers, networks and volumes")
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


def _copy(directory: Path) -> Path:
    """The files of ``docker/``, with a secret that the engines' user may read."""
    copied = directory / "docker"
    shutil.rmtree(copied, ignore_errors=True)
    shutil.copytree(DOCKER, copied, ignore=shutil.ignore_patterns("secrets"))
    (copied / "secrets").mkdir()
    secret = copied / "secrets/pdconn.secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    os.chown(secret, _USER, _USER)
    return copied


def _keep_logs(made: Fleet) -> None:
    """What each container wrote, beside the files: the first thing to read after a failure."""
    for service in (*made.stack.engines(), "router", ALONE):
        try:
            text = made.log(service)
        except DockerFailed as failure:
            text = str(failure)
        (made.directory / f"{service}.log").write_text(text)
