"""Keys of vLLM's in-tree NixlConnector in ``kv_connector_extra_config``, and their meaning here.

Manifests written for NixlConnector must start.  :data:`IN_TREE_KEYS` has every key that is not one
of ours as well.  A key is either *translated* to one of ours, or *not needed*: then it is checked
and left out, and the log of the engine's scheduler has the reason.  A key beside the one of ours
that it translates to is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pdconn.vllm.values import lease, number, truth
from transport.errors import FieldError

CROSS_LAYERS = "BHLNC"
"""The layout of ``enable_cross_layers_blocks``: all layers of a block side by side."""

ANSWER_TTL_S = 480
"""NixlConnector's default of ``decoder_kv_blocks_ttl``."""


class InTreeKeyError(FieldError, ValueError):
    """A key of NixlConnector has an invalid value, or contradicts one of ours."""


@dataclass(frozen=True, slots=True)
class InTreeKey:
    """One key of NixlConnector.

    Attributes:
        check: returns the value, or raises ValueError with the expected one.
        ours: the key of ours that it translates to; empty if it is not needed.
        meaning: its translation, or why it is not needed.
    """

    name: str
    takes: str
    check: Callable[[Any], Any]
    ours: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Translated:
    """A configuration in our keys alone, and notes for the log."""

    extra: dict[str, Any]
    notes: tuple[str, ...]


def translate(extra: Mapping[str, Any], role: str = "kv_both") -> Translated:
    """``extra`` with NixlConnector's keys translated, or left out.

    Args:
        extra: the user's mapping.
        role: vLLM's ``kv_role``; only engines with ``kv_both`` lend answers back.

    Raises:
        InTreeKeyError: naming the key, the expected and the seen value.
    """
    theirs = {key.name: _value(key, extra) for key in IN_TREE_KEYS if key.name in extra}
    made = {name: value for name, value in extra.items() if name not in theirs}
    unneeded = {key.name: key.meaning for key in IN_TREE_KEYS if not key.ours}
    notes = [
        f"{name} is not needed, because {unneeded[name]}" for name in theirs if name in unneeded
    ]
    if theirs.get("bidirectional_kv_xfer"):
        _refuse_both("bidirectional_kv_xfer", "lend_back", extra)
        if role == "kv_both":
            made["lend_back"] = {"seconds": theirs.get("decoder_kv_blocks_ttl", ANSWER_TTL_S)}
        else:
            notes.append(
                "bidirectional_kv_xfer has no effect, because answers are lent back and pulled by "
                f"engines with kv_role kv_both alone: kv_role={role}"
            )
    elif "decoder_kv_blocks_ttl" in theirs:
        notes.append(
            "decoder_kv_blocks_ttl is not needed, because bidirectional_kv_xfer is off and decode "
            "lends nothing"
        )
    if theirs.get("enable_cross_layers_blocks"):
        _refuse_both("enable_cross_layers_blocks", "layout", extra)
        made["layout"] = CROSS_LAYERS
    return Translated(made, tuple(notes))


def _value(key: InTreeKey, extra: Mapping[str, Any]) -> Any:
    try:
        return key.check(extra[key.name])
    except ValueError as error:
        raise InTreeKeyError(key.name, error, repr(extra[key.name])) from None


def _refuse_both(theirs: str, ours: str, extra: Mapping[str, Any]) -> None:
    if ours in extra:
        hint = f"{theirs} is NixlConnector's key for the same"
        raise InTreeKeyError(ours, f"one of {ours} and {theirs}", "both", hint)


IN_TREE_KEYS: tuple[InTreeKey, ...] = (
    InTreeKey(
        "bidirectional_kv_xfer", "true, false", truth, "lend_back",
        f"answers are lent back for {ANSWER_TTL_S} seconds, or `decoder_kv_blocks_ttl`; needs "
        "`kv_role: kv_both` on every engine, else it has no effect, with a warning in the log",
    ),
    InTreeKey(
        "decoder_kv_blocks_ttl", "seconds", lease, "lend_back",
        "the lease of answers that are lent back; without `bidirectional_kv_xfer` not needed",
    ),
    InTreeKey(
        "enable_cross_layers_blocks", "true, false", truth, "layout",
        f'`"layout": "{CROSS_LAYERS}"`; vLLM 0.32 reads this key no more',
    ),
    InTreeKey(
        "engine_ttl", "seconds", number, "",
        "what is known of a peer is forgotten when its connection ends",
    ),
    InTreeKey(
        "kv_recompute_threshold", "tokens", number, "",
        "prefill pulls what it lacks of an answer however little it is, beside its steps",
    ),
    InTreeKey(
        "num_threads", "number", number, "",
        "one UCX thread reads, over one endpoint per peer, and long reads are cut into chunks",
    ),
    InTreeKey(
        "push_registration_timeout", "seconds", number, "",
        "decode pulls, and registers nothing with prefill",
    ),
)  # fmt: skip
