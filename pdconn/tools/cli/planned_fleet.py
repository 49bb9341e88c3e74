"""The options of ``pdconn plan`` for a fleet, and the forecast that they select."""

from __future__ import annotations

import argparse

from pdconn.router.roles.role_controller import RoleTargets
from pdconn.store.settings import size_of
from pdconn.tools.cli.common_options import BadArgument, tokens
from pdconn.tools.plan.fleet.fleet_forecast import (
    CardRates,
    FleetForecast,
    FleetQuestion,
    engine_rates,
    forecast_fleet,
)
from pdconn.tools.plan.fleet.fleet_load import LoadPhase
from pdconn.tools.plan.forecast import Forecast
from pdconn.tools.plan.link import parse_link
from pdconn.tools.plan.plan_errors import ShapeError

PHASE_S = 600.0
"""Duration of a phase that names none."""
_LOAD = "REQUESTS/S,PROMPT,ANSWER[,SECONDS] such as 3.5,8k,200"


def configure_fleet(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--fleet", type=int, metavar="ENGINES",
        help="which ratio of prefill and decode engines suits a load, and what the router's "
        "--roles follow gives; needs --load, --prefill-rate, --step-ms and both targets",
    )  # fmt: skip
    group.add_argument(
        "--load", action="append", type=load_phase, metavar="R,P,A[,S]",
        help="requests per second, mean tokens of prompt and answer, and seconds (default: "
        f"{PHASE_S:g}); repeat for phases that follow each other",
    )  # fmt: skip
    group.add_argument(
        "--step-ms", type=float, metavar="MS", help="decode's time between tokens of one stream"
    )
    group.add_argument(
        "--memory-rate", default="3.35TB/s", metavar="SPEED",
        help="memory bandwidth of a rank, by which further streams cost what reading their KV "
        "takes (default: %(default)s, an H100's)",
    )  # fmt: skip
    group.add_argument("--kv-memory", metavar="SIZE", help="memory of a rank for KV, such as 40GiB")
    group.add_argument(
        "--ttft-target", type=float, metavar="SECONDS", help="target of the first token"
    )
    group.add_argument(
        "--itl-target", type=float, metavar="SECONDS", help="target between two tokens"
    )


def load_phase(text: str) -> LoadPhase:
    """A phase of a load.

    Raises:
        argparse.ArgumentTypeError: it is malformed.

    >>> load_phase("3.5,8k,200").prompt_tokens
    8192
    """
    words = text.split(",")
    try:
        rate, prompt, answer, seconds = words if len(words) == 4 else [*words, str(PHASE_S)]
        return LoadPhase(float(seconds), float(rate), tokens(prompt), tokens(answer))
    except (ValueError, ShapeError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"expected {_LOAD}, got {text!r}") from error


def forecast_planned_fleet(args: argparse.Namespace, made: Forecast) -> FleetForecast | None:
    """The forecast of the fleet; None if not requested.

    Raises:
        BadArgument, ShapeError: an option is missing or invalid.
    """
    if args.fleet is None:
        return None
    for flag, value in (
        ("--load", args.load),
        ("--prefill-rate", args.prefill_rate),
        ("--step-ms", args.step_ms),
        ("--ttft-target", args.ttft_target),
        ("--itl-target", args.itl_target),
    ):
        if value is None:
            raise BadArgument(flag, "a value, for --fleet", "nothing")
        if flag.endswith("-target") and not value > 0:
            raise BadArgument(flag, "seconds, above 0", value)
    question = FleetQuestion(
        args.fleet, tuple(args.load), RoleTargets(ttft_s=args.ttft_target, itl_s=args.itl_target)
    )
    card = CardRates(
        prefill_tokens_per_s=args.prefill_rate,
        step_s=args.step_ms / 1e3,
        memory_bytes_per_s=_memory_rate(args.memory_rate),
        kv_nbytes=None if args.kv_memory is None else _size(args.kv_memory),
    )
    return forecast_fleet(question, engine_rates(made, card, question.phases))


def _memory_rate(text: str) -> float:
    try:
        return parse_link(text).bytes_per_s
    except ShapeError as error:
        raise BadArgument("--memory-rate", "a speed like 3.35TB/s", text) from error


def _size(text: str) -> int:
    try:
        return size_of(text)
    except ValueError as error:
        raise BadArgument("--kv-memory", str(error), text) from error
