"""The part of Kubernetes' API that ``kubectl get pods`` calls, over HTTP on loopback: tests have no cluster."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rpc_runtime.processes import Closing
from tests.helpers.waiting import PATIENCE_SECONDS


class KubernetesApi(Closing):
    """Serves ``pods``; ``config`` is a file that leads kubectl to this server, into the namespace ``lab``."""

    def __init__(self, folder: Path) -> None:
        self.pods: list[dict[str, Any]] = []
        self.selectors: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.config = folder / "kubeconfig"
        context = {"cluster": "here", "user": "me", "namespace": "lab"}
        self.config.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {"name": "here", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}
                    ],
                    "users": [{"name": "me", "user": {}}],
                    "contexts": [{"name": "here", "context": context}],
                    "current-context": "here",
                }
            )
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_SECONDS)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        name = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["get", "list"]}
        answers = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [name]},
            "/api/v1/namespaces/lab/pods": {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": self.pods},
        }
        if parts.path.endswith("/pods"):
            self.selectors += parse_qs(parts.query).get("labelSelector", [])
        reason = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "reason": "Forbidden"}
        refusal = {**reason, "message": "you may not list these\x1b[2J"}
        is_known = parts.path in answers
        body = json.dumps(answers.get(parts.path, refusal)).encode()
        request.send_response(200 if is_known else 403)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


def pod(name: str, address: str, *, ready: bool = True, phase: str = "Running", **metadata: Any) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    ports = [{"name": "health", "containerPort": 7002}, {"name": "worker", "containerPort": int(port)}]
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": name, "namespace": "lab", **metadata},
        "spec": {"containers": [{"name": "worker", "ports": ports}]},
        "status": {"phase": phase, "podIP": host, "conditions": conditions},
    }
