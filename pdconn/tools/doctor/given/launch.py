"""Finds the vLLM in a command: its words and its environment, behind any launcher.

NAME=VALUE vllm serve MODEL ...             env NAME=VALUE ..., sudo, srun, numactl, nohup
python -m vllm.entrypoints.openai.api_server --model MODEL ...
docker run -e NAME=VALUE IMAGE MODEL ...    podman, nerdctl; the image's own `vllm serve`
bash -c "vllm serve MODEL ..."
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pdconn.tools.doctor.given.shell import ReadText, ShellCommand, read_script

_MODULE = re.compile(r"vllm\.entrypoints\.(?:openai|launchers)\.api_server(?:\.entry)?")
_CLI_MODULES = ("vllm", "vllm.entrypoints.cli.main")
_SHELLS = ("sh", "bash", "dash", "zsh", "ash")
_SHELL_SCRIPT = re.compile(r"-[a-z]*c")
_RUNTIMES = ("docker", "podman", "nerdctl")
_CONTAINER_FLAGS = (
    "-d", "-i", "-t", "-P", "-q", "--detach", "--interactive", "--tty", "--publish-all", "--rm",
    "--privileged", "--init", "--quiet", "--read-only", "--no-healthcheck", "--oom-kill-disable",
    "--sig-proxy", "--use-api-socket", "--replace", "--rmi", "--disable-content-trust",
    "--no-hosts", "--no-hostname", "--tls-verify", "--http-proxy", "--env-host", "--passwd",
    "--read-only-tmpfs",
)  # fmt: skip
"""Options of ``docker run`` and ``podman run`` that take no value."""
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL | re.ASCII)
_TRANSFER = re.compile(r"--kv[-_]t[a-z_-]*(?:[.=].*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Launch:
    """A start of vLLM.

    Attributes:
        words: after ``vllm serve``.
        environ: variables set for it.
        name: name of its container or service; "" without one.
        in_container: whether it has a container's files and addresses, not this host's.
        is_host_network: whether its container has the host's addresses.
        inherits: whether it also gets the environment of the starting shell.
        files: texts that the script has written, by path.
        folder: base of relative file names, beside the current one.
    """

    words: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    in_container: bool = False
    is_host_network: bool = False
    inherits: bool = True
    files: Mapping[str, str] = field(default_factory=dict)
    folder: str = "."


def launches_of_script(text: str, environ: Mapping[str, str], read: ReadText) -> list[Launch]:
    """Every start of vLLM in a script; without one, a bare list of vLLM's options.

    Raises:
        BadQuestion: the script cannot be parsed.
    """
    commands, files = read_script(text, environ, read)
    found = [
        replace(one, files=files)
        for command in commands
        for one in launches_of(command, environ, read)
    ]
    if found:
        return found
    return [
        Launch(command.words, command.variables, files=files)
        for command in commands
        if any(_TRANSFER.fullmatch(word) for word in command.words)
    ]


def launches_of(
    command: ShellCommand, environ: Mapping[str, str], read: ReadText
) -> Iterator[Launch]:
    """The starts of vLLM in one command."""
    words, own = command.words, dict(command.variables)
    for at, word in enumerate(words):
        name = word.rpartition("/")[2]
        rest = words[at + 1 :]
        if (behind := _behind_vllm(name, rest)) is not None:
            yield Launch(behind, own)
        elif name in _SHELLS and rest and (script := _script_of(rest)) is not None:
            for one in launches_of_script(script, {**environ, **own}, read):
                yield replace(one, environ={**own, **one.environ})
        elif name in _RUNTIMES and rest[:1] and rest[0] in ("run", "create", "exec"):
            yield from _of_container(rest, own, environ, read)
        elif name in _RUNTIMES and rest[:2] == ("container", "run"):
            yield from _of_container(rest[1:], own, environ, read)
        else:
            if _ASSIGNED.fullmatch(word):  # of env, sudo, or Kubernetes' --env
                key, _, value = word.partition("=")
                own[key] = value
            continue
        return


def _behind_vllm(name: str, rest: Sequence[str]) -> tuple[str, ...] | None:
    """The words after ``vllm serve`` in any of its spellings; None for another command."""
    if name == "vllm" and rest[:1] and rest[0] == "serve":
        return tuple(rest[1:])
    if name == "-m" and rest and _MODULE.fullmatch(rest[0]):
        return tuple(rest[1:])
    if name == "-m" and len(rest) > 1 and rest[0] in _CLI_MODULES and rest[1] == "serve":
        return tuple(rest[2:])
    if name == "api_server.py":
        return tuple(rest)
    return None


def _script_of(words: Sequence[str]) -> str | None:
    """The script after ``-c``, ``-lc`` and the like."""
    for word, following in pairwise(words):
        if _SHELL_SCRIPT.fullmatch(word):
            return following
        if not word.startswith(("-", "+")):
            return None
    return None


@dataclass(slots=True)
class _ContainerOptions:
    environ: dict[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    is_host_network: bool = False
    name: str = ""


def _of_container(
    words: Sequence[str], shell: Mapping[str, str], environ: Mapping[str, str], read: ReadText
) -> Iterator[Launch]:
    """Parse ``run``, its options, an image, and the command in it."""
    options = _ContainerOptions()
    rest = list(words[1:])
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if name in _CONTAINER_FLAGS or re.fullmatch(r"-[ditPq]{2,}", name):
            continue
        if re.fullmatch(r"-[euhlmpvw].+", name) and not name.startswith("--"):
            value, name = name[2:] + equals + value, name[:2]
        elif not equals:
            value = rest.pop(0) if rest else ""
        _take_option(options, name, value, {**environ, **shell}, read)
    if not rest:
        return
    inner = ShellCommand((*options.entrypoint, *rest[1:]), options.environ)
    found = list(launches_of(inner, {}, read))
    if not found and not options.entrypoint and words[0] != "exec":
        found = [Launch(inner.words, options.environ)]  # the image's entry point is vllm serve
    for one in found:
        yield replace(
            one, name=options.name, in_container=True, inherits=False,
            is_host_network=options.is_host_network,
        )  # fmt: skip


def _take_option(
    options: _ContainerOptions, name: str, value: str, outer: Mapping[str, str], read: ReadText
) -> None:
    if name in ("-e", "--env"):
        key, equals, given = value.partition("=")
        if equals or key in outer:
            options.environ[key] = given if equals else outer[key]
    elif name == "--env-file":
        options.environ |= variables_of_file(read(value) or "", outer)
    elif name == "--entrypoint":
        options.entrypoint = tuple(value.strip('[]"').split('","'))
    elif name in ("--network", "--net"):
        options.is_host_network = value == "host"
    elif name == "--name":
        options.name = value


def variables_of_file(text: str, outer: Mapping[str, str]) -> dict[str, str]:
    """``NAME=VALUE`` lines; a name alone is inherited from outside."""
    found: dict[str, str] = {}
    for line in map(str.strip, text.splitlines()):
        key, equals, value = line.removeprefix("export ").partition("=")
        if not line or line.startswith(("#", ";")):
            continue
        if equals:
            found[key.strip()] = value.strip().strip("\"'")
        elif key in outer:
            found[key] = outer[key]
    return found


def is_transfer_option(word: str) -> bool:
    """Whether a word is ``--kv-transfer-config``, in any of vLLM's spellings."""
    return _TRANSFER.fullmatch(word) is not None
