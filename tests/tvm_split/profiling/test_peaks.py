from dataclasses import replace

from rpc_runtime.client.local_workers import LocalWorkers
from rpc_runtime.client.remote_kernels import RemoteKernels
from rpc_runtime.program.measurements import KernelSet
from tvm_split.compiler.blob_folder import BlobFolder
from tvm_split.compiler.targets import host_target, target_text
from tvm_split.profiling.peaks import PEAK_EFFORT, peak_code


def test_a_worker_times_the_kernels_of_the_peaks() -> None:
    code, blobs = peak_code(host_target(1), 1), BlobFolder.temporary()
    library = code.build(frozenset(code.distinct), blobs)
    kernels = tuple(call.timed for call in code.calls)
    with LocalWorkers(["here"]) as workers, RemoteKernels(workers.endpoints["here"], 60.0) as session:
        session.load(KernelSet("here", "cpu", library, kernels, 0, target_text(code.target)), blobs.path)
        adding, reading = session.measure(replace(PEAK_EFFORT, minimum_rounds=2))
    assert (adding.error, reading.error) == ("", "")
    added, read = (call.kernel for call in code.calls)
    assert added.operations / adding.seconds > 1e8
    assert read.moved_bytes / reading.seconds > 1e7
