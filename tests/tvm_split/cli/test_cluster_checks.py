"""``tvm-split doctor --cluster``: real workers, workers that lie, and the checks of what a worker reports."""

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest

import tvm_split
from rpc_runtime.client.worker_client import CudaDescription, CudaDeviceDescription, HeldDeployment, WorkerDescription
from rpc_runtime.wire import worker_pb2 as pb
from rpc_runtime.wire.channels import WorkerEndpoint
from rpc_runtime.wire.framing import PROTOCOL_VERSION
from rpc_runtime.wire.messages import value_of
from rpc_runtime.wire.security import TlsFiles
from rpc_runtime.worker.description import describe
from tests.helpers.rpc_runtime.certificates import make_authority, worker_arguments
from tests.helpers.rpc_runtime.hostile_worker import HostileWorker
from tests.helpers.rpc_runtime.raw_calls import METHODS
from tests.helpers.rpc_runtime.worker_process import ready, start_worker
from tests.helpers.waiting import PATIENCE_SECONDS
from tvm_split.cli.cluster_checks import machine_findings
from tvm_split.cluster.launcher import AskedMachine, ask_worker
from tvm_split.cluster.machine import Machine
from tvm_split.display.findings import Finding, Findings, Level
from tvm_split.display.view import as_json, view
from tvm_split.profiling.link_probing import probe_links
from tvm_split.profiling.store import default_folder

OK, WARNING, PROBLEM = Level
WIDTH = 80
EVERY = {"worker", "TVM", "package", "clock", "TLS", "token", "target", "cores", "load", "memory", "disk", "files"}
"""The checks of a machine that has no target and no GPU."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    """Two workers with the token in ``token``: their folder, and their addresses by machine."""
    folder = tmp_path_factory.mktemp("workers")
    (folder / "token").write_text("open-sesame")
    with ExitStack() as processes:
        started = {
            name: processes.enter_context(
                start_worker(folder / name, "--name", name, "--token-file", str(folder / "token"), "--json")
            )
            for name in ("near", "next")
        }
        processes.callback(lambda: [process.kill() for process in started.values()])
        yield folder, {name: ready(process) for name, process in started.items()}


def entries(folder, addresses, **further):
    return [
        {"name": name, "address": address, "token_file": str(folder / "token"), **further}
        for name, address in addresses.items()
    ]


def cluster_file(path, machines, links=()):
    path.write_text(json.dumps({"machines": machines, **({"links": links} if links else {})}))
    return path


def levels(report, machine):
    return {finding["check"]: finding["level"] for finding in report["findings"] if finding["machine"] == machine}


def shown_text(report):
    return str(Findings(tuple(Finding(**{**row, "level": Level(row["level"])}) for row in report["findings"])))


def test_a_dead_machine_hides_nothing_of_the_others(invoke_json, workers, tmp_path):
    folder, addresses = workers
    path = cluster_file(tmp_path / "cluster.yaml", entries(folder, {"far": "127.0.0.1:9", **addresses}))
    report = invoke_json("doctor", "--cluster", path, code=1)
    assert report["ok"] is False
    assert all(set(finding) == set(Finding.__dataclass_fields__) for finding in report["findings"])
    assert all(finding["meaning"] and finding["remedy"] for finding in report["findings"] if finding["level"] != OK)
    assert levels(report, "far") == {"worker": PROBLEM}
    for name in addresses:
        assert levels(report, name).keys() >= EVERY
        assert PROBLEM not in levels(report, name).values()
    links = {(row["machine"], row["found"].split(":")[0]) for row in report["findings"] if row["check"] == "link"}
    assert links == {(a, f"to {b}") for a in ("client", *addresses) for b in ("client", *addresses) if a != b}
    shown = shown_text(report)
    assert "127.0.0.1:9" in shown
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_a_cluster_in_order_has_no_problem_and_keeps_nothing(invoke_json, workers, tmp_path, monkeypatch):
    folder, addresses = workers
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(tmp_path / "cache"))
    path = cluster_file(tmp_path / "cluster.yaml", entries(folder, {"near": addresses["near"]}))
    assert invoke_json("doctor", "--cluster", path)["ok"] is True
    assert not default_folder().exists()


def test_links_are_compared_with_earlier_measurements(invoke_json, workers, tmp_path, monkeypatch):
    folder, addresses = workers
    monkeypatch.setenv("TVM_SPLIT_CACHE", str(tmp_path / "cache"))
    path = cluster_file(tmp_path / "cluster.yaml", entries(folder, {"near": addresses["near"]}))
    probe_links(tvm_split.Cluster.from_yaml(path), (3 << 20,), cache_folder=default_folder())
    found = [row["found"] for row in invoke_json("doctor", "--cluster", path)["findings"] if row["check"] == "link"]
    assert len(found) == 2
    assert all("ago" in text for text in found)


@pytest.mark.slow
def test_a_link_that_cannot_be_used_hides_no_other(invoke_json, workers, tmp_path):
    folder, addresses = workers
    links = [{"from": "near", "to": "next", "address": "127.0.0.1:9"}]
    path = cluster_file(tmp_path / "cluster.yaml", entries(folder, addresses), links)
    report = invoke_json("doctor", "--cluster", path, "--timeout", "3", code=1)
    links = [finding for finding in report["findings"] if finding["check"] == "link"]
    assert [finding["machine"] for finding in links if finding["level"] == PROBLEM] == ["near"]
    assert {row["machine"] for row in links if row["level"] != PROBLEM} == {"client", "near", "next"}


@pytest.mark.parametrize(
    ("entry", "check"),
    [
        ({"token_file": "wrong"}, "worker"),
        ({"target": {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}}, "target"),
    ],
)
def test_an_entry_that_its_worker_does_not_fit(invoke_json, workers, tmp_path, entry, check):
    (tmp_path / "wrong").write_text("guessed")
    folder, addresses = workers
    (machine,) = entries(folder, {"near": addresses["near"]})
    path = cluster_file(tmp_path / "cluster.yaml", [{**machine, **entry}])
    found = levels(invoke_json("doctor", "--cluster", path, code=1), "near")
    assert [name for name, level in found.items() if level == PROBLEM] == [check]


@pytest.mark.parametrize(
    ("how", "check", "level", "text"),
    [
        ({"days": 60}, "TLS", OK, "verified, for localhost, 127.0.0.1"),
        ({"days": 3}, "TLS", WARNING, "expires in 3 days"),
        ({"names": "DNS:elsewhere.example"}, "worker", PROBLEM, "its certificate is not for the host '127.0.0.1'"),
    ],
)
def test_certificates(tmp_path, how, check, level, text):
    authority = make_authority(tmp_path)
    files = authority.files("box", **how)
    (tmp_path / "token").write_text("open-sesame")
    arguments = ["--token-file", str(tmp_path / "token"), *worker_arguments(files, mutual=False)]
    with start_worker(tmp_path / "cache", *arguments) as process:
        try:
            tls = TlsFiles(authority.certificate)
            answer = ask_worker(WorkerEndpoint("box", ready(process), "open-sesame", tls), PATIENCE_SECONDS)
            (finding,) = [one for one in machine_findings([answer], None) if one.check == check]
        finally:
            process.kill()
    assert finding.level is level
    assert text in finding.found


def test_what_a_lying_worker_says_breaks_nothing(invoke_json, workers):
    """Names of millions of letters, control characters, markup, and numbers that no machine has."""
    folder, addresses = workers
    text = "[red]\x1b[31m\u202e\n" + "x" * 1_000_000
    device = pb.CudaDevice(arch=text, memory_bytes=2**64 - 1)
    reply = pb.DescribeReply(
        protocol_version=PROTOCOL_VERSION,
        **dict.fromkeys(("machine", "hostname", "tvm_version", "package_version", "boot_id"), text),
        deployments=[pb.HeldDeployment(name=text, model=text, owner=text)] * 3,
        **dict.fromkeys(("memory_total_bytes", "memory_free_bytes", "wall_clock_nanoseconds"), 2**64 - 1),
        cuda_devices=[device],
        cores=2**32 - 1,
        threads=2**32 - 1,
        load=1e308,
        host_core_count=1,
    )
    answer = {METHODS["Describe"].path: lambda requests, context: iter([reply.SerializeToString()])}
    with HostileWorker("liar", answer) as liar:
        where = f"at:{liar.endpoint.address},{addresses['near']}?token_file={folder}/token"
        report = invoke_json("doctor", "--cluster", where, code=1)
    shown = shown_text(report)
    assert shown.replace("\n", "").isprintable()
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "[red]" in shown
    assert len(json.dumps(report)) < 200_000
    assert levels(report, "near").keys() >= EVERY
    assert {row["found"].split(":")[0] for row in report["findings"] if row["machine"] == "near"} >= {"to client"}


def test_wrong_use(invoke):
    assert "--cluster" in invoke("doctor", "--workers", "2", code=2).stderr


@pytest.fixture(scope="module")
def box(tmp_path_factory) -> WorkerDescription:
    """This host as a worker describes it: one of enough memory, disk and cores, on another host."""
    reply = describe("box", 1, 0, [], tmp_path_factory.mktemp("cache"))
    offsets = {"clock_offset_nanoseconds": 0, "wall_clock_offset_nanoseconds": 0, "round_trip_seconds": 1e-3}
    roomy = dict.fromkeys(("memory_total_bytes", "memory_free_bytes", "cache_free_bytes"), 10**12)
    return replace(
        value_of(WorkerDescription, reply, **offsets),
        **roomy,
        **{"boot_id": "elsewhere", "core_numbers": (0, 1), "core_quota": 0.0, "host_core_count": 2, "load": 0.0},
        cuda_devices=(),
    )


X86 = {"architecture": "x86_64", "cpu_features": ("sse2", "fxsr", "cx8", "cmov", "mmx", "sse", "fpu")}
X86_TARGET = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
GPU = CudaDeviceDescription(0, "sm_90", 10**11, 10**10)


@pytest.mark.parametrize(
    ("check", "level", "facts", "entry"),
    [
        ("worker", PROBLEM, {"machine": "desk"}, {}),
        ("worker", PROBLEM, {}, {"threads": 64}),
        ("TVM", PROBLEM, {"tvm_version": "0.26.0"}, {}),
        ("package", WARNING, {"package_version": "9"}, {}),
        ("clock", OK, {"wall_clock_offset_nanoseconds": 10**9}, {}),
        ("clock", WARNING, {"wall_clock_offset_nanoseconds": -(10**12)}, {}),
        ("TLS", WARNING, {}, {}),
        ("token", WARNING, {}, {}),
        ("target", PROBLEM, X86, {"target": {**X86_TARGET, "mattr": ["+avx512f"]}}),
        (
            "features",
            WARNING,
            {**X86, "cpu_features": (*X86["cpu_features"], "ssse3", "pni")},
            {"target": X86_TARGET},
        ),
        ("target", PROBLEM, {}, {"target": {"kind": "llvm", "mcpu": "nothing"}}),
        ("cores", WARNING, {"threads": 3}, {}),
        ("load", WARNING, {"load": 1.5}, {}),
        ("load", OK, {"load": 1.5, "deployments": (HeldDeployment("a", "bird", "me", 1, 1.0),)}, {}),
        ("memory", WARNING, {"memory_free_bytes": 10**8}, {}),
        ("memory", WARNING, {"memory_free_bytes": 10**10}, {"memory_bytes": 10**11}),
        ("disk", WARNING, {"cache_free_bytes": 10**8}, {}),
        ("files", WARNING, {"file_limit": 256}, {}),
        ("GPU", OK, {"cuda_devices": (GPU,), "cuda": CudaDescription(13000, "", "")}, {}),
        ("GPU", PROBLEM, {}, {"target": {"kind": "cuda", "arch": "sm_90"}}),
    ],
)
def test_a_fact_and_its_level(box, check, level, facts, entry):
    machine = Machine("box", endpoint=WorkerEndpoint("box", "10.0.0.7:7001"), **entry)
    answer = AskedMachine(machine.endpoint, replace(box, **facts))
    (finding,) = [one for one in machine_findings([answer], tvm_split.Cluster((machine,))) if one.check == check]
    assert finding.level is level
    assert all((finding.meaning, finding.remedy)) == (level is not OK)


def test_workers_of_one_host_are_named_beside_each_other_and_need_names(box):
    answers = [AskedMachine(WorkerEndpoint(name, "10.0.0.7:1"), replace(box, machine=name)) for name in ("a", "b", "a")]
    findings = machine_findings(answers, None)
    assert {one.level for one in findings if (one.machine, one.check) == ("a", "worker")} == {PROBLEM}
    assert {one.level for one in findings if (one.machine, one.check) == ("b", "worker")} == {OK}
    assert all("on its host" in one.found and one.level is WARNING for one in findings if one.check == "cores")


def test_findings_are_shown_with_their_remedies_in_80_columns():
    findings = Findings(
        (Finding("m" * 90, "c", WARNING, "f " * 900, "it means", "do it"), Finding("n", "c", OK, "all"))
    )
    shown = str(findings)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "→ do it" in shown
    assert findings.ok
    assert as_json(findings)["findings"][1] == {
        **{"machine": "n", "check": "c", "level": "ok", "found": "all"},
        **{"meaning": "", "remedy": ""},
    }
    assert list(view(findings))
