"""Schemas of the custom resources that the manifests use: the documented fields of each, and
no others, so that one which is misspelt, or new here, is refused.

Those of the Gateway API and its Inference Extension are the published ones (``schemas``), whose
servers drop unknown fields; here these are refused, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _only(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(api: str, kind: str, spec: Any) -> dict[str, Any]:
    meta = _only(("name", "namespace"), name=_TEXT, namespace=_TEXT, labels=_TEXTS)
    return _only(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=meta,
        spec=spec,
    )


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_COUNT = {"type": "integer", "minimum": 0}
_TIME = {"type": "string", "pattern": r"^(\d+(ms|[smhdwy]))+$"}
_EXPRESSION = _only(
    ("key", "operator"),
    key=_TEXT,
    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
    values=_list(_TEXT),
)
_SELECTOR = _only(matchLabels=_TEXTS, matchExpressions=_list(_EXPRESSION))

_RELABELING = _only(
    sourceLabels=_list(_TEXT),
    targetLabel=_TEXT,
    regex=_TEXT,
    replacement=_TEXT,
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
)
_ENDPOINT = _only(
    ("port",),
    port=_TEXT,
    path={"type": "string", "pattern": "^/"},
    interval=_TIME,
    scrapeTimeout=_TIME,
    scheme={"enum": ["http", "https"]},
    relabelings=_list(_RELABELING),
    metricRelabelings=_list(_RELABELING),
)
POD_MONITOR = _resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    _only(
        ("selector", "podMetricsEndpoints"),
        selector=_SELECTOR,
        podMetricsEndpoints=_list(_ENDPOINT),
        jobLabel=_TEXT,
        namespaceSelector=_only(matchNames=_list(_TEXT), any={"type": "boolean"}),
    ),
)

_RULE = {
    "alert": _TEXT,
    "expr": _TEXT,
    "for": _TIME,
    "keep_firing_for": _TIME,
    "labels": _only(("severity",), severity={"enum": ["critical", "warning", "info"]}),
    "annotations": _only(("summary", "description"), summary=_TEXT, description=_TEXT),
}
GROUPS = _list(
    _only(
        ("name", "rules"),
        name=_TEXT,
        interval=_TIME,
        rules=_list(_only(("alert", "expr", "labels", "annotations"), **_RULE)),
    )
)
PROMETHEUS_RULE = _resource(
    "monitoring.coreos.com/v1", "PrometheusRule", _only(("groups",), groups=GROUPS)
)

_POLICIES = _list(
    _only(
        ("type", "value", "periodSeconds"),
        type={"enum": ["Pods", "Percent"]},
        value={"type": "integer", "minimum": 1},
        periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
    )
)
_SCALING = _only(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies=_POLICIES,
)
_TRIGGER = _only(
    ("type", "metadata"),
    type={"const": "prometheus"},
    name=_TEXT,
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_only(
        ("serverAddress", "query", "threshold"),
        serverAddress={"type": "string", "pattern": "^https?://"},
        query=_TEXT,
        threshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
        activationThreshold={"type": "string", "pattern": r"^\d+(\.\d+)?$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
SCALED_OBJECT = _resource(
    "keda.sh/v1alpha1",
    "ScaledObject",
    _only(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=_only(("name",), apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        pollingInterval=_COUNT,
        cooldownPeriod=_COUNT,
        fallback=_only(("failureThreshold", "replicas"), failureThreshold=_COUNT, replicas=_COUNT),
        advanced=_only(
            horizontalPodAutoscalerConfig=_only(
                behavior=_only(scaleUp=_SCALING, scaleDown=_SCALING)
            )
        ),
        triggers=_list(_TRIGGER),
    ),
)

# The pods in it are held to Kubernetes' own schema, see ``misshapen``.
_POD = _only(("metadata", "spec"), metadata={"type": "object"}, spec={"type": "object"})
LEADER_WORKER_SET = _resource(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    _only(
        ("leaderWorkerTemplate",),
        replicas=_COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=_only(subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        leaderWorkerTemplate=_only(
            ("workerTemplate",),
            size={"type": "integer", "minimum": 1},
            restartPolicy={
                "enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]
            },
            leaderTemplate=_POD,
            workerTemplate=_POD,
        ),
    ),
)


def _published(name: str) -> dict[str, Any]:
    path = Path(__file__).parent / f"schemas/{name}.json"
    schema = _strict(json.loads(path.read_text(encoding="utf-8")))
    schema["properties"]["metadata"] = POD_MONITOR["properties"]["metadata"]
    return dict(schema)


def _strict(node: Any) -> Any:
    """A schema whose objects have no properties but those that it names."""
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: _strict(value) for key, value in node.items()}
    if made.get("type") == "object" and "properties" in made:
        made["additionalProperties"] = False
    return made


SCHEMAS = {
    "HTTPRoute": _published("httproute"),
    "InferencePool": _published("inferencepool"),
    "LeaderWorkerSet": LEADER_WORKER_SET,
    "PodMonitor": POD_MONITOR,
    "PrometheusRule": PROMETHEUS_RULE,
    "ScaledObject": SCALED_OBJECT,
}
