"""The files in ``deploy`` for Kubernetes and compose fit their schemas and the worker that they start.

There is no cluster and no container engine: what these make of the files is not tested here.
"""

import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import kubernetes_validate
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc_runtime.client.worker_client import describe
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.worker.config import config_from_arguments
from tests.helpers.rpc_lab import free_port
from tests.helpers.rpc_runtime.certificates import make_authority
from tests.helpers.rpc_runtime.worker_process import ready, start_worker
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.cluster.cluster import Cluster
from tvm_split.launchers.running import PORT_NAME

DEPLOY = Path(__file__).parent.parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.30", "1.34")
"""gRPC probes are stable since 1.27."""


def resources() -> list[dict[str, Any]]:
    base = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    return [resource for name in base["resources"] for resource in yaml.safe_load_all((KUBERNETES / name).read_text())]


def of_kind(kind: str) -> dict[str, Any]:
    (chosen,) = (resource for resource in resources() if resource["kind"] == kind)
    return chosen


def pod() -> dict[str, Any]:
    return dict(of_kind("StatefulSet")["spec"]["template"])


def container() -> dict[str, Any]:
    (only,) = pod()["spec"]["containers"]
    return dict(only)


def arguments(template: list[str], values: Mapping[str, str]) -> list[str]:
    """Return the arguments with $(NAME) filled in, as Kubernetes does it."""
    return [re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], word) for word in template]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("resource", resources(), ids=lambda resource: resource["kind"])
def test_resources_fit_the_schema(resource: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="builds with kubectl")
def test_kustomize_builds_all_of_it() -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES)]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    built_resources = list(yaml.safe_load_all(built))
    assert sorted(resource["kind"] for resource in built_resources) == sorted(
        resource["kind"] for resource in resources()
    )
    (image,) = re.findall(r"image: (\S+)", built)
    (named,) = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["images"]
    assert image == f"{named['name']}:{named['newTag']}"


def test_names_fit_together() -> None:
    labels = pod()["metadata"]["labels"]
    stateful, service, policy = (of_kind(kind) for kind in ("StatefulSet", "Service", "NetworkPolicy"))
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    for selector in (
        stateful["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        policy["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports[PORT_NAME] == service["spec"]["ports"][0]["port"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container()[probe]["grpc"]["port"] == ports["health"]
    command_line = arguments(container()["args"], {"POD_NAME": "tvm-split-0", "THREADS": "2"})
    (secret,) = (argument for argument in command_line if argument.startswith("--token-file="))
    # The file of the secret is not on this host.
    config = config_from_arguments([argument for argument in command_line if argument != secret])
    assert (config.listen, config.health_listen) == (f"0.0.0.0:{ports[PORT_NAME]}", f"0.0.0.0:{ports['health']}")
    assert (config.name, config.threads, config.insecure) == ("tvm-split-0", 2, False)
    assert {mount["name"] for mount in container()["volumeMounts"]} == {
        volume["name"] for volume in pod()["spec"]["volumes"]
    }
    mounts = [Path(mount["mountPath"]) for mount in container()["volumeMounts"]]
    assert config.cache is not None
    assert config.tls is not None
    token = Path(secret.partition("=")[2])
    for path in (token, config.cache, config.tls.certificate, config.tls.key, config.tls.authority):
        assert path is not None
        assert any(path.is_relative_to(mount) for mount in mounts)


def test_nothing_runs_as_root_or_may_become_it() -> None:
    limits = container()["securityContext"]
    assert (limits["allowPrivilegeEscalation"], limits["readOnlyRootFilesystem"]) == (False, True)
    assert limits["capabilities"] == {"drop": ["ALL"]}
    assert pod()["spec"]["securityContext"]["runAsNonRoot"]
    user = re.findall(r"^USER (\d+):(\d+)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    assert user == [(str(pod()["spec"]["securityContext"]["runAsUser"]),) * 2]


def test_the_worker_of_the_statefulset_starts_and_is_healthy(tmp_path: Path) -> None:
    """It has the manifest's arguments, with files and ports of this test: TLS, a token, and health without either."""
    lab, port = make_authority(tmp_path), free_port()
    files = lab.files("box")
    assert files.certificate is not None
    assert files.key is not None
    for name, source in (("tls.crt", files.certificate), ("tls.key", files.key), ("ca.crt", lab.certificate)):
        shutil.copy(source, tmp_path / name)
    (tmp_path / "token").write_text("open-sesame\n")
    command_line = arguments(container()["args"], {"POD_NAME": "tvm-split-0", "THREADS": "1"})
    command_line = [re.sub(r"/etc/tvm-split/\w+", str(tmp_path), argument) for argument in command_line]
    command_line = [
        argument.replace("0.0.0.0:7001", "127.0.0.1:0").replace("0.0.0.0:7002", f"127.0.0.1:{port}")
        for argument in command_line
    ]
    command_line = [argument for argument in command_line if not argument.startswith("--cache")]
    process = start_worker(tmp_path / "blobs", *command_line, "--json")
    try:
        address = ready(process)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert describe(WorkerEndpoint("tvm-split-0", address, "open-sesame", lab.files("me")), PATIENCE_SECONDS).secure
        process.send_signal(signal.SIGTERM)
        assert process.wait(pod()["spec"]["terminationGracePeriodSeconds"]) == 0
    finally:
        process.kill()
        process.communicate()


def test_compose_starts_what_its_cluster_file_names(shared: Path) -> None:
    folder = DEPLOY / "compose"
    composed = yaml.safe_load((folder / "compose.yaml").read_text())
    shutil.copy(folder / "cluster.yaml", shared)
    page = (DEPLOY.parent / "docs/machines.md").read_text()
    (commands,) = re.findall(r"^mkdir -m .*\n.*\n(?=docker compose)", page, re.MULTILINE)
    subprocess.run(commands.replace("deploy/compose/", ""), shell=True, cwd=shared, check=True)
    assert (shared / composed["secrets"]["token"]["file"]).stat().st_mode & 0o004  # the containers' user may read it
    cluster = Cluster.from_yaml(shared / "cluster.yaml")  # and no other user of this host
    published = {}
    for name, service in composed["services"].items():
        # The token is where compose puts secrets; this path does not exist on this host.
        config = config_from_arguments(
            [argument for argument in service["command"] if not argument.startswith("--token-file=")]
        )
        assert "--token-file=/run/secrets/token" in service["command"]
        assert config.name == name
        assert config.listen.startswith("0.0.0.0:")
        assert config.health_listen in service["healthcheck"]["test"][-1]
        ((host, outside, inside),) = (port.split(":") for port in service["ports"])
        assert (host, inside) == ("127.0.0.1", config.listen.rpartition(":")[2])
        published[name] = f"{host}:{outside}"
        for source in cluster.machine_names:
            link = cluster.link(source, name) if source != name else None
            assert link is None or link.address == f"{name}:{inside}"
        dockerfile = folder / service["build"]["context"] / service["build"]["dockerfile"]
        assert dockerfile.resolve() == DEPLOY / "Containerfile"
    assert published == {machine.name: machine.address for machine in cluster.machines}


def test_what_observes_listens_on_loopback_alone_and_its_files_are_there() -> None:
    folder = DEPLOY / "compose"
    services = yaml.safe_load((folder / "observe.yaml").read_text())["services"]
    for service in services.values():
        assert re.fullmatch(r"\S+:v?\d+\.\d+\.\d+", service["image"])
        assert service["network_mode"] == "host"
        for source in (volume.split(":")[0] for volume in service["volumes"] if volume.startswith(".")):
            assert (folder / source).is_file()
    prometheus, grafana = services["prometheus"], services["grafana"]
    (listen,) = (word for word in prometheus["command"] if word.startswith("--web.listen-address="))
    assert listen == "--web.listen-address=127.0.0.1:9090"
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == f"http://{listen.partition('=')[2]}"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    mounts = [volume.split(":")[1] for volume in grafana["volumes"]]
    assert any(Path(mount).is_relative_to(provider["options"]["path"]) for mount in mounts)
    (targets,) = yaml.safe_load((folder / "targets.yaml").read_text())
    assert all(target.startswith("127.0.0.1:") for target in targets["targets"])


def test_what_the_containerfile_copies_is_there() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    ignored = (DEPLOY.parent / ".dockerignore").read_text().split()
    copied = [name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for name in line.split()]
    assert copied
    for name in copied:
        assert (DEPLOY.parent / name).exists()
        assert name not in ignored
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert 'readme = "README.md"' in project
    for room in ("relay_passes", "schedules", "rpc_runtime"):
        assert room in copied
