"""The settings of roles that follow the load."""

from __future__ import annotations

from dataclasses import dataclass

from pdconn.router.fleet.member import Role
from pdconn.router.router_errors import BadSetting
from pdconn.router.router_options import CheckedSettings, number, option, seconds

STATIC, FOLLOW, DRY_RUN = "static", "follow", "dry-run"


@dataclass(frozen=True, slots=True)
class RoleSettings(CheckedSettings):
    """Whether engines change role, and when.

    Every other time of the controller is a share or a multiple of ``role_period_s``.
    """

    roles: str = option(
        STATIC,
        says="static: engines keep the roles that they are listed in; follow: an engine that is "
        "listed in both roles serves one of them at a time, the one that lacks engines; dry-run: "
        "only log and export what follow would do",
        choices=(STATIC, FOLLOW, DRY_RUN),
    )
    ttft_target_s: float | None = option(
        None,
        "SECONDS",
        seconds(),
        "with --roles, the time to first token that nine of ten requests should keep",
        parse=float,
        unset="none",
    )
    itl_target_s: float | None = option(
        None,
        "SECONDS",
        seconds(0.0001),
        "with --roles, the time between two tokens of an answer that decode should keep",
        parse=float,
        unset="none",
    )
    min_prefill: int = option(
        1, "N", number(1), "with --roles follow, leave at least this many to prefill", parse=int
    )
    min_decode: int = option(
        1, "N", number(1), "with --roles follow, leave at least this many to decode", parse=int
    )
    role_period_s: float = option(
        60.0, "SECONDS", seconds(0.1), "let at most one engine change its role in this time",
        parse=float,
    )  # fmt: skip
    role_drain_s: float = option(
        60.0,
        "SECONDS",
        seconds(0),
        "an engine that changes its role finishes its requests first, but takes the new role "
        "after this time at the latest, and finishes the rest beside it",
        parse=float,
    )

    def check_together(self) -> None:
        if self.roles == STATIC:
            return
        for flag, target in (
            ("--ttft-target", self.ttft_target_s),
            ("--itl-target", self.itl_target_s),
        ):
            if target is None:
                raise BadSetting(flag, f"seconds, beside --roles {self.roles}", None)

    @property
    def floors(self) -> dict[Role, int]:
        """The least engines of each role."""
        return {Role.PREFILL: self.min_prefill, Role.DECODE: self.min_decode}
