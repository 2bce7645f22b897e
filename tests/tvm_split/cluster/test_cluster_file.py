import json
from pathlib import Path

import pytest

from tests.helpers.mutations import WRONG_FILES
from tvm_split.cluster.cluster import Cluster
from tvm_split.cluster.machine import Link, SharedCores, SshAccess
from tvm_split.errors import ClusterError

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
    (tmp_path / "secret").write_text("sesame\n")
    cluster = Cluster.from_yaml(write(tmp_path, GOOD))
    assert cluster.machine_names == ("desk", "box")
    assert cluster.machine("desk").memory_bytes == 16_000_000_000
    assert cluster.machine("box").endpoint.token == "sesame"
    assert cluster.machine("box").endpoint.address == "[2001:db8::1]:7001"
    assert cluster.links == (Link("desk", "box", 1.25e8, 0.001), Link("box", "desk", 1.25e8, 0.001))
    assert not any(machine.standby for machine in cluster.machines)
    waiting = GOOD.replace("    threads: 8", "    threads: 8\n    standby: true")
    assert Cluster.from_yaml(write(tmp_path, waiting)).planned.machine_names == ("box",)


@pytest.mark.parametrize("codec", ["auto", "none", "fp16", "bf16", "int8", "lz4", "zstd"])
def test_a_codec_counts_in_both_directions(tmp_path: Path, codec: str) -> None:
    (tmp_path / "secret").write_text("sesame\n")
    cluster = Cluster.from_yaml(write(tmp_path, GOOD.replace("0.001}", f"0.001, codec: {codec}}}")))
    assert [link.codec for link in cluster.links] == [codec, codec]
    with pytest.raises(ClusterError, match="has codec 'zip'; there are auto, none, fp16"):
        Link("desk", "box", codec="zip")


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        ("    threads: 8", "    treads: 8", 4, "machines.0.treads: there is no such key; did you mean 'threads'?"),
        (
            "threads: 8",
            "standby: 2",
            4,
            "must be true or false (it is 2); for example standby: true",
        ),
        ("threads: 8", "threads: -1", 4, "machines.0.threads: must be greater than or equal to 1 (it is -1)"),
        ("192.0.2.10:7001", "192.0.2.10", 3, "machines.0.address: an address is HOST:PORT"),
        ("name: box", "name: desk", 6, "named 'desk'; give each a name of its own; the first is in "),
        ("name: box", "name: client", 6, "cannot be named 'client'"),
        ("    threads: 8", "    name: lamp", 4, "the key 'name' is there twice, first in line 2"),
        ("to: box", "to: boy", 11, "no machine is named 'boy'; there are desk, box"),
        ("to: box", "to: desk", 11, "the link from 'desk' joins a machine to itself"),
        ("1.25e8", "-5", 11, "has bytes_per_second=-5.0; give more than 0"),
        ("{from: desk, to: box", "{source: desk, to: box", 11, "no such key; did you mean 'from'?"),
        ("0.001}", "0.001}\n  - {from: desk, to: box}", 12, "second link from 'desk' to 'box'; leave one, or turn one"),
        ("latency_seconds: 0.001", "address: box", 11, "the link from 'desk' to 'box': an address is HOST:PORT"),
        ("machines:", "machine:", 1, "there is no such key; did you mean 'machines'?"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, right: str, wrong: str, line: int, message: str) -> None:
    (tmp_path / "secret").write_text("sesame\n")
    assert_named(tmp_path, GOOD, right, wrong, f"{line}: ", message)


def assert_named(folder: Path, text: str, right: str, wrong: str, line: str, message: str) -> None:
    """Assert that a line of the error about a file with ``wrong`` instead of ``right`` has this line and message."""
    assert right in text
    path = write(folder, text.replace(right, wrong))
    with pytest.raises(ClusterError) as caught:
        Cluster.from_yaml(path)
    lines = str(caught.value).splitlines()
    assert any(reported.startswith(f"{path}:{line}") and message in reported for reported in lines), lines


THREE = """\
machines:
  - {name: desk, address: "desk:1"}
  - {name: box, address: "box:1"}
  - {name: edge, address: "edge:1"}
"""


def test_every_pair_needs_a_link_if_any_is_given(tmp_path: Path) -> None:
    path = write(tmp_path, THREE + "links:\n  - {from: desk, to: edge}\n")
    with pytest.raises(ClusterError) as caught:
        Cluster.from_yaml(path)
    assert f"{path}:5: links: no link between 'desk' and 'box', 'box' and 'edge'; " in str(caught.value)
    assert "bytes_per_second: 0 if nothing may pass" in str(caught.value)
    with pytest.raises(ClusterError, match=":5: links: no link between 'desk' and 'box'"):
        Cluster.from_yaml(write(tmp_path, THREE + "links: []\n"))


def test_links_that_are_unequal_closed_or_measured(tmp_path: Path) -> None:
    links = """\
links:
  - {from: desk, to: box, bytes_per_second: 2e6, latency_seconds: 0.1}
  - {from: box, to: desk, bytes_per_second: 1e6}
  - {from: edge, to: box, bytes_per_second: 0}
  - {from: desk, to: edge, address: "10.0.0.7:7001"}
  - {from: client, to: desk, bytes_per_second: 3e6}
"""
    cluster = Cluster.from_yaml(write(tmp_path, THREE + links))
    assert cluster.link("desk", "box") == Link("desk", "box", 2e6, 0.1)
    assert cluster.link("box", "desk") == Link("box", "desk", 1e6)
    for ends in (("box", "edge"), ("edge", "box")):
        link = cluster.link(*ends)
        assert link is not None
        assert link.is_closed
    assert cluster.link("desk", "edge") == Link("desk", "edge", None, 0.0, "10.0.0.7:7001")
    assert cluster.link("edge", "desk") == Link("edge", "desk")
    assert cluster.link("desk", "client") == Link("desk", "client", 3e6)
    assert cluster.link("client", "box") is None
    assert cluster.link_settings["desk", "edge"].address == "10.0.0.7:7001"


GROUPED = """\
groups:
  lab: [desk, box]
  campus: [lab, edge]
"""


def test_groups_have_links_in_common(tmp_path: Path) -> None:
    """The entry with the fewest pairs counts, also for the opposite direction."""
    links = """\
links:
  - {from: campus, to: campus, bytes_per_second: 1e6}
  - {from: lab, to: lab, bytes_per_second: 1e9, latency_seconds: 0.001}
  - {from: box, to: edge, bytes_per_second: 5e6}
  - {from: client, to: campus, bytes_per_second: 3e6}
"""
    cluster = Cluster.from_yaml(write(tmp_path, THREE + GROUPED + links))
    speeds = {(link.source, link.destination): link.bytes_per_second for link in cluster.links}
    assert speeds["desk", "box"] == speeds["box", "desk"] == 1e9
    assert speeds["desk", "edge"] == speeds["edge", "desk"] == 1e6
    assert speeds["box", "edge"] == speeds["edge", "box"] == 5e6
    assert [speeds["client", name] for name in cluster.machine_names] == [3e6] * 3
    assert len(cluster.links) == len(speeds) == 12


def test_groups_may_lie_in_each_other_by_thousands_but_not_in_a_circle(tmp_path: Path) -> None:
    groups = {f"g{index}": [f"g{index + 1}"] for index in range(3000)} | {"g3000": ["desk", "box"]}
    link = "links:\n  - {from: g0, to: g0}\n  - {from: edge, to: g1500}\n"
    cluster = Cluster.from_yaml(write(tmp_path, f"{THREE}groups: {json.dumps(groups)}\n{link}"))
    assert {("desk", "box"), ("edge", "desk"), ("edge", "box")} <= {
        (link.source, link.destination) for link in cluster.links
    }
    with pytest.raises(ClusterError, match=r"group 'g\d+' is in itself, by g\d+, .* more …, .*g\d+"):
        Cluster.from_yaml(write(tmp_path, f"{THREE}groups: {json.dumps(groups | {'g3000': ['g7']})}\n{link}"))


def test_a_pair_s_own_link_counts_before_those_of_groups_with_one_machine(tmp_path: Path) -> None:
    text = (
        "groups:\n  lone: [desk]\n  all: [lone, box, edge]\nlinks:\n  - {from: all, to: all}\n"
        "  - {from: lone, to: box, bytes_per_second: 1e6}\n  - {from: box, to: desk, bytes_per_second: 5e6}\n"
    )
    cluster = Cluster.from_yaml(write(tmp_path, THREE + text))
    speeds = {(link.source, link.destination): link.bytes_per_second for link in cluster.links}
    assert speeds["desk", "box"] == speeds["box", "desk"] == 5e6


def test_of_hundreds_of_machines_a_few_are_named(tmp_path: Path) -> None:
    names = [f"m{index:03}" for index in range(200)]
    machines = [{"name": name, "address": f"{name}.example:7001"} for name in names]
    rack = f"groups: {json.dumps({'rack': names[:150]})}\nlinks:\n  - {{from: rack, to: rack}}\n"
    for content, shown in ((machines, "… 8719 more …, "), (names, "… and 188 more")):
        with pytest.raises(ClusterError) as caught:
            Cluster.from_yaml(write(tmp_path, f"machines: {json.dumps(content)}\n{rack}"))
        assert shown in str(caught.value)
        assert len(str(caught.value).splitlines()) <= 13


@pytest.mark.parametrize(
    ("right", "wrong", "line", "message"),
    [
        ("lab: [desk, box]", "lab: [desk, bax]", 5, "group 'lab' has 'bax', neither a machine nor a group; there are"),
        ("lab: [desk, box]", "lab: [desk, campus]", 5, "is in itself, by "),
        ("lab: [desk", "edge: [desk", 5, "group 'edge' has the name of a machine"),
        ("to: campus", "to: campus}\n  - {from: campus, to: campus", 10, "second link from 'desk' to 'box'"),
    ],
)
def test_what_is_wrong_with_groups_is_named(tmp_path: Path, right: str, wrong: str, line: int, message: str) -> None:
    text = THREE + GROUPED + "links:\n  - {from: campus, to: campus}\n"
    assert_named(tmp_path, text, right, wrong, f"{line}: ", message)


LIBRARY_WORDS = ("valid", "Input", "List", "item", "convert", "string", "<", "token,", "constructor", "None", "pathlib")


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("", "file", "must be a dictionary; for example machines: [{name: desk, "),
        ("machines: []", "machines", "must have 1 or more entries; for example machines: [{name: desk, "),
        ("machines: {}", "machines", "must be a list; for example machines: [{name: desk, "),
        ("machines: [5]", "machines.0", "must be a dictionary (it is 5); for example machines: [{name: desk, "),
        ("memory: 2GB", "machines.0.memory", "did you mean 'memory_bytes'? For example memory_bytes: 16e9"),
        ("memory_bytes: 2GB", "machines.0.memory_bytes", "a number, without a unit (it is '2GB'); for example"),
        ("memory_bytes: yes", "machines.0.memory_bytes", "a number, without a unit (it is True); for example"),
        ("memory_bytes: [1]", "machines.0.memory_bytes", "a whole number; for example memory_bytes: 16e9"),
        ("target: llvm", "machines.0.target", "a dictionary (it is 'llvm'); for example target: {kind: llvm}"),
        ("target: {1: 2}", "machines.0.target.1", "in quotes if it looks like something else (it is 1); for example"),
        ("threads: two", "machines.0.threads", "a whole number (it is 'two'); for example threads: 8"),
        ("token_file: 3", "machines.0.token_file", "must be a path (it is 3); for example token_file: token"),
        ("tls: ca.pem", "machines.0.tls", "a dictionary (it is 'ca.pem'); for example tls: {ca: ca.pem, "),
        ("tls: {cert: a}", "machines.0.tls.cert", "must be 'ca', 'certificate' or 'key' (it is 'cert'); for example"),
        ("tls: {ca: nowhere}", "machines.0", "machine 'a': there is no TLS file "),
        ("ssh: box", "machines.0.ssh", "a dictionary (it is 'box'); for example ssh: {to: user@box}"),
        ("ssh: {to: b, arguments: -x}", "machines.0.ssh.arguments", "a list (it is '-x'); for example arguments: ["),
        (["machines: [{name: a}]"], "machines.0.address", "missing; for example address: "),
        (["machines: [{name: a, adress: 'h:1'}]"], "machines.0.adress", "did you mean 'address'? For example"),
        (["groups: {lab: a}"], "groups.lab", "must be a list (it is 'a'); for example groups: {lab: [desk, box]}"),
        (["links: [{from: a, to: a, latency_seconds: x}]"], "links.0.latency_seconds", "a number, without a unit"),
        (["links: [3]"], "links.0", "must be a dictionary (it is 3); for example links: [{from: desk, to: box}]"),
        (["shared_cores: [{machines: a, cores: 1}]"], "shared_cores.0.machines", "must be a list (it is 'a'); for"),
        (["shared_cores: [{machines: [a], cores: 0}]"], "shared_cores.0.cores", "greater than or equal to 1 (it is 0)"),
        (["shared_cores: [{machines: [a], cores: 16000000000}]"], "shared_cores.0.cores", "than or equal to 8192"),
        ("ssh: {to: -oProxyCommand=true}", "machines.0.ssh", "ssh takes a destination like box or user@box, got '-oP"),
        ("ssh: {to: b, pyhton: python3}", "machines.0.ssh.pyhton", "there is no such key; did you mean 'python'?"),
        ("ssh: {to: b, arguments: [--x]}", "machines.0.ssh", "a worker's options: unrecognized arguments: --x"),
        ("a: &a [*a", "", "indentation, colons, brackets or quotes are wrong here or in the line before"),
        ("? [a]\n: b", "", "keys are plain text"),
        ("a: 2001-99-99", "", "this is not YAML, such as machines: [{name: desk, "),
    ],
)
def test_a_wrong_value_is_explained_by_an_example(
    tmp_path: Path, text: str | list[str], place: str, expected: str
) -> None:
    """One error, by its line and keys, in our words; short texts are keys of a machine, lists further lines."""
    machine = "machines: [{name: a, address: 'h:1'"
    if isinstance(text, list):
        text = text[0] if text[0].startswith("machines") else f"{machine}}}]\n{text[0]}"
    elif place.startswith("machines.0") and "machines" not in text:
        text = f"{machine}, {text}}}]"
    with pytest.raises(ClusterError) as caught:
        Cluster.from_yaml(write(tmp_path, text))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path}/cluster.yaml")
    assert f": {place}: " in line or not place
    assert expected in line
    assert not [word for word in LIBRARY_WORDS if word in line]


@pytest.mark.parametrize("content", WRONG_FILES, ids=lambda content: repr(content[:20]))
def test_what_is_no_cluster_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_bytes(content)
    with pytest.raises(ClusterError, match=r"cluster\.yaml"):
        Cluster.from_yaml(path)


def test_a_token_file_without_a_token_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("open sesame\n")
    with pytest.raises(ClusterError, match=r"machine 'box': .*without blanks, and .*secret holds something else"):
        Cluster.from_yaml(write(tmp_path, GOOD))


CORES = """\
groups:
  both: [desk, box]
shared_cores:
  - {machines: [both, client], cores: 4}
"""


def test_machines_groups_and_the_client_share_cores(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sesame\n")
    cluster = Cluster.from_yaml(write(tmp_path, GOOD + CORES))
    assert cluster.shared_cores == (SharedCores(("desk", "box", "client"), 4),)


def test_ssh(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("machines: [{name: box, address: 'box:7001', ssh: {to: me@box, arguments: [--insecure]}}]")
    (machine,) = Cluster.from_yaml(path).machines
    assert machine.ssh == SshAccess("me@box", "python3", "~/.cache/tvm-split/ssh", ("--insecure",))
