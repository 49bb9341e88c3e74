"""A forecast as JSON: bytes, counts and seconds, not rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdconn.tools.plan.advice import Advice
from pdconn.tools.plan.engine import EngineShape
from pdconn.tools.plan.forecast import Cost, Forecast, GroupForecast
from pdconn.tools.plan.hf.families import FAMILIES
from pdconn.tools.plan.link import PRESETS, Link
from pdconn.tools.plan.model import LayerSort, ModelShape
from pdconn.tools.plan.shapes import SHAPES


def to_json(made: Forecast, advice: Sequence[Advice]) -> dict[str, Any]:
    """A document for ``json.dumps``; ``total`` is the sum of ``groups`` and of ``ranks``."""
    return {
        "model": made.decode.model.name,
        "kv": _kv(made.decode.model),
        "prompt_tokens": made.prompt_tokens,
        "hit_tokens": made.hit_tokens,
        "pulled_until": made.prompt_tokens - 1,
        "ids": made.ids,
        "prefill": _engine(made.prefill),
        "decode": _engine(made.decode),
        "link": _link(made.link),
        "prefill_link": _link(made.prefill_link),
        "groups": [_group(group, made) for group in made.groups],
        "ranks": [_cost(cost, made.link) for cost in made.received],
        "sent_bytes": list(made.sent),
        "total": {**_amounts(made.total), "clipping": made.total.clipping},
        "busiest": {"rank": made.busiest_rank, **_cost(made.busiest, made.link)},
        "seconds": made.seconds,
        "latency_s": made.latency_s,
        "requests_per_s": made.requests_per_s,
        "links": [_over(made.over(link)) for link in PRESETS],
        "slowest": {"side": made.slowest.side, "rank": made.slowest.rank},
        "warnings": [{"code": one.code, "text": one.text} for one in advice],
    }


def listing() -> dict[str, Any]:
    """The built-in shapes, and the families whose ``config.json`` is read."""
    shapes = [
        {"name": shape.name, "kv": _kv(shape), "sorts": [_sort(sort) for sort in shape.attention]}
        for shape in SHAPES
    ]
    return {"shapes": shapes, "model_types": list(FAMILIES)}


def _sort(sort: LayerSort) -> dict[str, Any]:
    return {
        "part": sort.part,
        "kind": str(sort.kind),
        "layers": len(sort.layers),
        "window": sort.window,
        "kv_heads": sort.heads,
        "row_bytes_per_head": sort.row_nbytes,
        "tokens_per_row": sort.row_tokens,
        "block_tokens": sort.block_tokens,
    }


def _engine(engine: EngineShape) -> dict[str, Any]:
    return {
        "tp": engine.tp,
        "pp": engine.pp,
        "layout": engine.layout,
        "block_tokens": engine.block_tokens,
    }


def _link(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "bytes_per_s": link.bytes_per_s,
        "descriptor_s": link.descriptor_s,
        "round_trip_s": link.round_trip_s,
        "source": link.source,
        "assumed": sorted(link.assumed),
    }


def _kv(model: ModelShape) -> dict[str, Any]:
    """Bytes of the whole model; of a token, but ``state_bytes`` of a request."""
    nbytes = model.token_bytes
    return {
        "dtype": model.kv_dtype,
        "resolved_dtype": model.stored_as,
        "bytes_per_token": nbytes.full + nbytes.windows,
        "full_attention_bytes_per_token": nbytes.full,
        "window_bytes_per_token": nbytes.windows,
        "state_bytes": nbytes.states,
    }


def _over(made: Forecast) -> dict[str, Any]:
    """The same pull over one link of the menu, on both sides."""
    return {
        **_link(made.link),
        "seconds": made.seconds,
        "requests_per_s": made.requests_per_s,
        "slowest": {"side": made.slowest.side, "rank": made.slowest.rank},
    }


def _group(one: GroupForecast, made: Forecast) -> dict[str, Any]:
    return {
        "group": one.number,
        "kind": str(one.group.kind),
        "window": one.group.window,
        "layers": one.group.num_layers,
        "their_block_tokens": one.their_block_tokens,
        "our_block_tokens": one.group.block_tokens,
        "sources": list(one.sources),
        **_amounts(one.cost),
        "busiest": _cost(one.busiest, made.link),
        "seconds": made.seconds_of(one),
    }


def _cost(cost: Cost, link: Link) -> dict[str, Any]:
    return {**_amounts(cost), "seconds": cost.seconds(link)}


def _amounts(cost: Cost) -> dict[str, Any]:
    return {
        "bytes": cost.nbytes,
        "runs": cost.runs,
        "mean_run_bytes": cost.mean_run_nbytes,
        "state_bytes": cost.state,
        "saved_by_window_bytes": cost.saved_by_window,
        "saved_by_hits_bytes": cost.saved_by_hits,
    }
