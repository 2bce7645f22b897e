from __future__ import annotations

from pathlib import Path

import pytest

from tvm_split.cluster import Cluster
from tvm_split.errors import ClusterError
from tvm_split.machine import Link

GOOD = """\
machines:
  - name: desk
    address: 192.0.2.10:7001
    threads: 8
    memory_bytes: 16e9
  - name: box
    address: "[2001:db8::1]:7001"
    target: {kind: cuda, arch: sm_87}
    token_file: secret
links:
  - {from: desk, to: box, bytes_per_second: 1.25e8, latency_seconds: 0.001}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_file_becomes_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("open sesame\n")
    cluster = Cluster.from_yaml(write(tmp_path, GOOD))
    assert cluster.machine_names == ("desk", "box")
    assert cluster.machine("desk").memory_bytes == 16_000_000_000
    assert cluster.machine("box").endpoint.token == "open sesame"
    assert cluster.machine("box").endpoint.address == "[2001:db8::1]:7001"
    assert cluster.links == (Link("desk", "box", 1.25e8, 0.001),)


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        ("    threads: 8", "    treads: 8", 4, "Extra inputs are not permitted"),
        ("threads: 8", "threads: -1", 4, "greater than or equal to 1"),
        ("192.0.2.10:7001", "192.0.2.10", 3, "is not HOST:PORT"),
        ("name: box", "name: desk", 6, "two machines are named 'desk', the first in line 2"),
        ("to: box", "to: boy", 11, "no machine is named 'boy'; there are desk, box"),
        ("1.25e8", "-5", 11, "greater than 0"),
        ("machines:", "machine:", 1, "Field required"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, right: str, wrong: str, line: int, message: str) -> None:
    path = write(tmp_path, GOOD.replace(right, wrong))
    with pytest.raises(ClusterError, match=r"cluster\.yaml") as caught:
        Cluster.from_yaml(path)
    assert f"{path}:{line}: " in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["machines: [", "machines: []", "[]", ""])
def test_what_is_no_cluster_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ClusterError, match=r"cluster\.yaml"):
        Cluster.from_yaml(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read the cluster file .*nowhere\.yaml"):
        Cluster.from_yaml(tmp_path / "nowhere.yaml")
