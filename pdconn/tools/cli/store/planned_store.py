"""The options of ``pdconn plan`` for a store, and the forecast that they select."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from pdconn.store.settings import COMPRESSION, WINDOW_EVERY, size_of
from pdconn.tools.cli.common_options import BadArgument, tokens
from pdconn.tools.plan.engine_shape import EngineShape
from pdconn.tools.plan.link import parse_link
from pdconn.tools.plan.plan_errors import ShapeError
from pdconn.tools.plan.store.cost import (
    STAGING,
    StoreForecast,
    forecast_store,
)


def configure_store(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--store",
        action="store_true",
        help="what the prompt takes in a store, and the time to load it into --decode",
    )
    group.add_argument(
        "--store-rate",
        default="3GB/s",
        metavar="SPEED",
        help="read rate of the store, for all ranks together (default: %(default)s)",
    )
    group.add_argument(
        "--store-window-every",
        default="auto",
        metavar="EVERY",
        help="window_every of the store: auto, all, last or tokens (default: %(default)s)",
    )
    group.add_argument(
        "--store-staging",
        default=f"{STAGING >> 30}GiB",
        metavar="SIZE",
        help="staging of the store: host memory of each rank (default: %(default)s)",
    )
    group.add_argument(
        "--store-compression",
        choices=COMPRESSION,
        default="none",
        help="compression of the store, for KV of bfloat16 (default: %(default)s)",
    )
    group.add_argument(
        "--prefill-rate",
        type=float,
        metavar="TOKENS/S",
        help="tokens per second that prefill computes, for --stream and the break-even of --store",
    )


def forecast_stored(args: argparse.Namespace, engine: EngineShape) -> StoreForecast | None:
    """The prompt's cost in a store; None if not requested.

    Raises:
        BadArgument: an option is invalid.
    """
    if not args.store:
        return None
    numbers = store_numbers(args)
    return forecast_store(
        engine,
        args.prompt,
        numbers.rate,
        prefill_rate=args.prefill_rate,
        window_every=numbers.every,
        staging=numbers.staging,
        is_packed=numbers.is_packed,
    )


@dataclass(frozen=True, slots=True)
class StoreNumbers:
    """The store of the options: bytes per second, ``window_every``, bytes of staging.

    ``is_packed``: its rows are compressed.
    """

    rate: float
    every: int | str
    staging: int
    is_packed: bool


def store_numbers(args: argparse.Namespace) -> StoreNumbers:
    """The store that the options describe.

    Raises:
        BadArgument: an option is invalid.
    """
    try:
        rate = parse_link(args.store_rate).bytes_per_s
    except ShapeError as error:
        raise BadArgument("--store-rate", "a speed like 3GB/s", args.store_rate) from error
    try:
        staging = size_of(args.store_staging)
    except ValueError as error:
        raise BadArgument("--store-staging", str(error), args.store_staging) from error
    every = args.store_window_every
    if every not in WINDOW_EVERY:
        try:
            every = tokens(every)
        except argparse.ArgumentTypeError:
            every = 0
        if not every:
            known = f"{', '.join(WINDOW_EVERY)} or a number of tokens"
            raise BadArgument("--store-window-every", known, args.store_window_every)
    return StoreNumbers(rate, every, staging, args.store_compression == "exponents")
