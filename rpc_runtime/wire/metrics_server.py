"""Serve metrics to Prometheus over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.process_collector import ProcessCollector

from rpc_runtime.wire.addresses import Address
from rpc_runtime.wire.http_server import HttpServer
from rpc_runtime.wire.security import TlsFiles


def metrics_server(listen: Address, collect: Callable[[], Iterable[Metric]], tls: TlsFiles | None = None) -> HttpServer:
    """Return a server of ``GET /metrics``: what ``collect`` returns at that moment, and this process's own metrics.

    There is no token, as Prometheus' default has none: callers learn names of models, machines and layers.

    Raises:
        WorkerError: the address cannot be used.
    """
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Collector(collect))
    return HttpServer(listen, make_wsgi_app(registry), "metrics", "/metrics", tls)


class _Collector:
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect
