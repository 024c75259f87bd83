"""Strategies that really serve: workers on devices, a policy, and the server that drives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nanopd.bench.compare import Strategy
from nanopd.bench.hardware import Hardware
from nanopd.bench.target import Target

if TYPE_CHECKING:
    from nanopd.router.decision import Policy
    from nanopd.workers.spec import DeviceSpec


def serving_strategy(
    name: str,
    model: Any,
    policy: Callable[[], Policy],
    *,
    collocated: Sequence[str | DeviceSpec] = (),
    prefill: Sequence[str | DeviceSpec] = (),
    decode: Sequence[str | DeviceSpec] = (),
    sms_per_device: int | None = None,
    on_open: Callable[[Any, Any], None] | None = None,
    **cluster_options: Any,
) -> Strategy:
    """``policy()`` over workers at these places, built when the strategy is opened and gone when it is left.

    Args:
        model: as ``Cluster.build`` takes it; a loaded one is shared by all strategies.
        sms_per_device: what a whole GPU has, for the check of equal hardware.
        on_open: called with (cluster, server) once they stand, to look at them.
        cluster_options: further ones of ``Cluster.build``.
    """

    @contextmanager
    def open_server() -> Iterator[Target]:
        from nanopd.router.predictor import OutputLengthPredictor
        from nanopd.router.server import Server
        from nanopd.workers.cluster import Cluster

        with (
            Cluster.build(model, collocated=collocated, prefill=prefill, decode=decode, **cluster_options) as cluster,
            # Token ids in, token ids out: text would only cost time.
            Server.of(cluster, policy(), predictor=OutputLengthPredictor(), tokenizer=None, seed=0) as server,
        ):
            if on_open is not None:
                on_open(cluster, server)
            yield server

    return Strategy(name, Hardware.of_specs([*collocated, *prefill, *decode], sms_per_device), open_server)
