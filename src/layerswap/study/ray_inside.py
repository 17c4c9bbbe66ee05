"""Contact with the inside of Ray; a test of its own holds each promise."""

from __future__ import annotations

import json
from typing import Any


def address_of(given: str) -> str | None:
    """Return `host:port` of Ray's cluster; None if it is unknown."""
    try:
        from ray._private.services import canonicalize_bootstrap_address

        return str(canonicalize_bootstrap_address(given) or "") or None
    except (ImportError, TypeError, ConnectionError, ValueError):
        return None


def is_fixed(nodes: list[dict[str, Any]]) -> bool:
    """True if every node was started by hand, so that no autoscaler adds one.

    Ray's monitor gives such a node its own id as its type. False if the monitor does not tell.
    """
    try:
        from ray.experimental.internal_kv import _internal_kv_get

        status = json.loads(_internal_kv_get(b"__autoscaling_status", namespace=None))
        types = status["autoscaler_report"]["node_type_mapping"]
    except (ImportError, TypeError, ValueError, KeyError):
        return False
    ids = {node["NodeID"] for node in nodes}
    grouped = any("ray.io/node-group" in node.get("Labels", {}) for node in nodes)
    return bool(ids) and not grouped and all(types.get(i) == f"node_{i}" for i in ids)
