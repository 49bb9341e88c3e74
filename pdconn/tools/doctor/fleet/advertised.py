"""Checks the addresses in tickets: whether prefill, or a relay to it, answers there for decode.

The meaning of an address depends on the connecting host, loopback above all::

    doctor here ──127.0.0.1:5600──► an engine or relay of this host, or nothing
    decode there ─127.0.0.1:5600──► an engine or relay of *its* host

So a successful pull by decode proves an address, whatever this host sees of it; only without such a
pull does an answer to this host count.  A relay (``ssh -L``, a sidecar) is as good as prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pdconn.sidechannel.security import is_loopback
from pdconn.tools.doctor.findings import Finding, fault, note, warning
from pdconn.tools.doctor.fleet.channels import CREDENTIALS, ChannelFacts
from pdconn.tools.doctor.fleet.golden import GoldenFacts

_ADVERTISE = (
    'set "advertise_host" in kv_connector_extra_config of prefill to an address that decode '
    "reaches, or run a relay to prefill at that address on decode's host"
)


def judge_advertised(
    pairs: Sequence[GoldenFacts], channels: Mapping[str, ChannelFacts]
) -> Iterator[Finding]:
    """Judge the addresses in tickets, given decode's pulls.

    Args:
        pairs: pairs that a golden prompt passed through.
        channels: answers to this host, by address.
    """
    for where in dict.fromkeys(one.advertised for one in pairs if one.advertised):
        users = [one for one in pairs if one.advertised == where]
        found = channels.get(where)
        if found is not None:
            yield from _address(where, users, found)


def _address(where: str, users: Sequence[GoldenFacts], found: ChannelFacts) -> Iterator[Finding]:
    local = is_loopback(where.rpartition(":")[0].strip("[]"))
    pulled = [one for one in users if one.pulled]
    others = [one for one in users if not one.pulled]
    named = {one.engine_id for one in users} - {None}
    seen = None if found.described is None else found.described.engine_id
    if pulled and (found.error is not None or (seen is not None and named and seen not in named)):
        answer = (
            "nothing answers this host there" if seen is None else f"engine {seen} answers here"
        )
        message = f"{pulled[0].decode} pulled by it, though {answer}"
        if found.is_refused:
            yield fault("channel.credentials", where, found.error or "", CREDENTIALS)
            return
        remedy = "none for that engine; to check the address itself run pdconn doctor on its host"
        yield note("channel.elsewhere", where, message, remedy)
    if not others:
        return
    if found.is_refused:
        yield fault("channel.credentials", where, found.error or "", CREDENTIALS)
    elif found.error is not None and not pulled:
        message = f"tickets name it, and it does not answer this host: {found.error}"
        yield fault("channel.advertised", where, message, _ADVERTISE)
    elif seen is not None and named and seen not in named:
        message = (
            f"tickets of engine {', '.join(sorted(map(str, named)))} name it, and {seen} answers"
        )
        yield fault("channel.other-engine", where, message, _ADVERTISE)
    elif local:
        yield from _loopback(where, others)


def _loopback(where: str, users: Sequence[GoldenFacts]) -> Iterator[Finding]:
    """Findings about loopback addresses, which lead elsewhere from another host."""
    for one in users:
        engine = one.decode.partition("://")[2].rpartition(":")[0].strip("[]")
        if is_loopback(engine):
            continue  # decode is here too, or behind a forwarded port: inconclusive
        message = f"loopback: it answers on this host, and decode at {engine} "
        if one.failed:
            message += "failed to pull by it"
            yield fault("golden.loopback", where, message, _ADVERTISE)
        else:
            message += "is not known to have pulled by it"
            remedy = f"nothing if decode or a relay to prefill shares this host; else {_ADVERTISE}"
            yield warning("golden.loopback", where, message, remedy)
