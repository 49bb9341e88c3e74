"""``pdconn doctor``: its options, and the checks that they select."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from pdconn.puller.warmup import Place
from pdconn.router.fleet.member import Role
from pdconn.router.fleet.sources import FleetSource, WatchedFile, parse_source
from pdconn.router.router_errors import BadSetting
from pdconn.tools.cli.common_options import (
    BadArgument,
    check_file,
    configure_guards,
    configure_json,
    publish,
)
from pdconn.tools.doctor.bad_question import BadQuestion
from pdconn.tools.doctor.examine import ChannelCredentials, FleetQuestions, Questions, examine
from pdconn.tools.doctor.fleet.channels import check_channel
from pdconn.tools.doctor.fleet.engines import trusting
from pdconn.tools.doctor.given.read import read_engines
from pdconn.tools.doctor.local.used import read_ucx_log
from pdconn.tools.doctor.probe import serve_probe
from pdconn.tools.output.progress_line import ProgressLine
from pdconn.tools.plan.link import parse_link
from pdconn.tools.plan.plan_errors import ShapeError

_EPILOG = """\
Checks this host, and with --prefill and --decode (or --fleet) running engines. Each
finding is a line that says what was expected and seen, and a line with the remedy:
fault (something does not work), warning (slow, or may fail later), note.

this host: versions beside each other; memlock, open files, huge pages, /dev/shm and
ptrace scope; network cards and GPUs with a ready UCX_NET_DEVICES and UCX_TLS line; the
UCX libraries, and what NIXL's UCX may connect by (started in a process of its own)
with --config also: its keys as the engine reads them, HMA, kv_load_failure_policy,
secret and TLS files, the side channel's address and port, the store's folder

--config takes the JSON of --kv-transfer-config, a line 'vllm serve ...' or 'docker run
...', or a file: either of them, vLLM's --config file, a script, a systemd unit, Compose
or Kubernetes YAML. Of a file with several engines FILE#NAME is one.

running engines: /health, /version, /v1/models and max_model_len, clocks, pulls and
leases of /metrics, ports and hashes of KV events. Engines are written as for pdconn
proxy: URL[,events=tcp://{host}:5557,replay=tcp://{host}:5657,ranks=N].
  --prefill-channel, --decode-channel  side channels (HOST:PORT) or description files:
      each answers, and every decode engine can pull from every prefill engine
  --golden  a prompt through each pair, compared with prefill alone: right tokens, a
      real pull, and the address in the ticket answers this host. Costs an answer of
      16 tokens per engine and pair; run it from decode's network

two hosts:
  --serve HOST:PORT on one and --probe HOST:PORT on the other read real bytes over
  NIXL: a pull of 2048 tokens of an 8B model beside one READ of as many bytes, and UCX
  reports the transports. The speed of that pull takes the place of --link where
  pulls are compared with the lease. Any host that reaches the port of --serve can make
  it allocate up to 2 GiB until it is stopped

transports that engines have used:
  --ucx-log FILE  what UCX printed in a decode engine that ran with UCX_PROTO_INFO=used
      and without UCX_LOG_FILE: its output, where UCX prints it as a connection ends

examples:
  pdconn doctor
  pdconn doctor --config prefill.json
  pdconn doctor --config "vllm serve MODEL --kv-transfer-config '{...}'"
  pdconn doctor --config compose.yaml#prefill
  pdconn doctor --prefill http://p0:8000 --decode http://d0:8000 --golden
  pdconn doctor --no-local --fleet fleet.toml --prefill-channel p0:5600 \\
      --decode-channel d0.json --secret-file /run/secrets/pdconn --link 100Gb/s
  pdconn doctor --serve 10.0.0.1:7788         pdconn doctor --probe 10.0.0.1:7788

exit codes:
  0    healthy: no fault (there may be warnings and notes)
  1    at least one fault
  2    bad command line, fleet file or configuration file
  130  interrupted by Ctrl-C; --serve ends with 0
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``pdconn doctor``."""
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--config", metavar="JSON|FILE|LINE", help="configuration of an engine that runs here")
    add("--no-local", dest="local", action="store_false", help="check running engines alone")
    configure_json(parser)
    add(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for each engine (%(default)g)",
    )
    _configure_fleet(parser)
    configure_guards(parser.add_argument_group("side channels with a secret or TLS"))
    hosts = parser.add_argument_group("bandwidth between two hosts")
    either = hosts.add_mutually_exclusive_group()
    either.add_argument("--serve", metavar="HOST:PORT", help="lend to probes until interrupted")
    either.add_argument("--probe", metavar="HOST:PORT", help="read from a host that serves")
    hosts.add_argument(
        "--link",
        metavar="SPEED",
        help="what the link should reach, like 100Gb/s: judges --probe, and without it whether a "
        "pull of max_model_len tokens fits lease and read_timeout",
    )


def _configure_fleet(parser: argparse.ArgumentParser) -> None:
    fleet = parser.add_argument_group("running engines")
    many = {"nargs": "+", "action": "extend", "default": []}
    fleet.add_argument("--prefill", metavar="URL", help="engines that compute prompts", **many)  # type: ignore[arg-type]
    fleet.add_argument("--decode", metavar="URL", help="engines that generate answers", **many)  # type: ignore[arg-type]
    fleet.add_argument("--fleet", metavar="FILE", help="TOML file of engines, as for pdconn proxy")
    for role in ("prefill", "decode"):
        fleet.add_argument(
            f"--{role}-channel",
            metavar="HOST:PORT|FILE",
            help=f"side channels or description files of {role} engines",
            **many,  # type: ignore[arg-type]
        )
    fleet.add_argument(
        "--golden", action="store_true", help="send a prompt through each pair and compare tokens"
    )
    fleet.add_argument(
        "--api-key-file", metavar="FILE", help="file with the key that the engines ask clients for"
    )
    fleet.add_argument(
        "--engine-ca",
        metavar="FILE",
        help="CA certificates, PEM, for engines at https:// (those of this system)",
    )
    fleet.add_argument(
        "--ucx-log",
        metavar="FILE",
        help="logs of engines that ran with UCX_PROTO_INFO=used: by what they have read",
        **many,  # type: ignore[arg-type]
    )
    fleet.add_argument("--hash-seed", metavar="SEED", help="the engines' PYTHONHASHSEED (unset)")


def run_command(args: argparse.Namespace) -> int:
    """Examine and print; the exit code is the verdict."""
    progress = ProgressLine(shown=not args.json)
    try:
        check_file("--json", args.json)
        if args.serve is not None:
            return _serve(_place("--serve", args.serve))
        diagnosis = examine(_questions(args), lambda step: progress.show_step(f"{step} ..."))
    except (BadArgument, BadQuestion, BadSetting, ShapeError) as error:
        progress.erase()
        print(f"pdconn doctor: {error}", file=sys.stderr)
        return 2
    finally:
        progress.erase()
    publish(diagnosis, args.json)
    return 0 if diagnosis.is_healthy else 1


def _serve(place: Place) -> int:
    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve_probe(place.host, place.port, lambda text: print(text, flush=True))
    except OSError as error:
        raise BadQuestion("--serve", "an address to listen at", f"{place}: {error}") from error
    return 0


def _questions(args: argparse.Namespace) -> Questions:
    sources: list[FleetSource] = []
    for option, role, words in (
        ("--prefill", Role.PREFILL, args.prefill),
        ("--decode", Role.DECODE, args.decode),
    ):
        sources += (parse_source(option, word, {role}) for word in words)
    if args.fleet is not None:
        sources.append(WatchedFile(args.fleet))
    channels = {
        option: tuple(check_channel(option, word) for word in words)
        for option, words in (
            ("--prefill-channel", args.prefill_channel),
            ("--decode-channel", args.decode_channel),
        )
    }
    place = None if args.probe is None else _place("--probe", args.probe)
    if args.golden and args.fleet is None and not (args.prefill and args.decode):
        seen = "one of them" if sources else "neither"
        raise BadQuestion("--golden", "--prefill and --decode, or --fleet, beside it", seen)
    if not (args.local or sources or any(channels.values()) or place or args.ucx_log):
        expected = "engines, side channels, --probe or --ucx-log beside it"
        raise BadQuestion("--no-local", expected, "none")
    configs = () if args.config is None else read_engines(args.config)
    fleet = FleetQuestions(
        tuple(sources),
        channels["--prefill-channel"],
        channels["--decode-channel"],
        api_key=None if args.api_key_file is None else _key(args.api_key_file),
        trusted=None if args.engine_ca is None else trusting("--engine-ca", args.engine_ca),
        asks_golden=args.golden,
        hash_seed=args.hash_seed,
        timeout_s=args.timeout,
    )
    tls = {"tls_cert": args.tls_cert, "tls_key": args.tls_key, "tls_ca": args.tls_ca}
    return Questions(
        local=args.local,
        configs=configs,
        fleet=fleet,
        credentials=ChannelCredentials(args.secret_file, tls, args.tls_check_hostname),
        ucx_logs=tuple(map(read_ucx_log, args.ucx_log)),
        link=None if args.link is None else parse_link(args.link),
        probe=None if place is None else (place.host, place.port),
        environ=dict(os.environ),
    )


def _place(option: str, text: str) -> Place:
    try:
        return Place.parse(text)
    except ValueError as error:
        raise BadQuestion(option, error, text) from None


def _key(path: str) -> str:
    try:
        words = Path(path).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise BadQuestion("--api-key-file", "a file to read", f"{path}: {why}") from None
    if not words:
        raise BadQuestion("--api-key-file", "a key", f"nothing in {path}")
    return words[0]


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 86400:
        raise argparse.ArgumentTypeError(f"expected above 0 and below 86400, got {text}")
    return seconds
