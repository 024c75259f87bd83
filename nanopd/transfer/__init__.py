"""KV on its way from one worker's pool to another's: handoffs and timelines (no torch), links (torch)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanopd.transfer.handoff import Handoff
    from nanopd.transfer.link import Link, Transfer
    from nanopd.transfer.peer import PeerLink
    from nanopd.transfer.pinned_relay import PinnedRelayLink
    from nanopd.transfer.probe import connect, probe_link
    from nanopd.transfer.report import LinkReport
    from nanopd.transfer.same_device import SameDeviceLink
    from nanopd.transfer.shared_pool import SharedPoolLink
    from nanopd.transfer.throttled import ThrottledLink
    from nanopd.transfer.timeline import LayerTimeline, Span, overlap_timeline

_HOME = {
    "Handoff": "handoff",
    "LayerTimeline": "timeline",
    "Link": "link",
    "LinkReport": "report",
    "PeerLink": "peer",
    "PinnedRelayLink": "pinned_relay",
    "SameDeviceLink": "same_device",
    "SharedPoolLink": "shared_pool",
    "Span": "timeline",
    "ThrottledLink": "throttled",
    "Transfer": "link",
    "connect": "probe",
    "overlap_timeline": "timeline",
    "probe_link": "probe",
}

__all__ = [
    "Handoff",
    "LayerTimeline",
    "Link",
    "LinkReport",
    "PeerLink",
    "PinnedRelayLink",
    "SameDeviceLink",
    "SharedPoolLink",
    "Span",
    "ThrottledLink",
    "Transfer",
    "connect",
    "overlap_timeline",
    "probe_link",
]


def __getattr__(name: str) -> Any:
    """Import on first use (PEP 562), so that policy and simulator can speak of handoffs without torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
