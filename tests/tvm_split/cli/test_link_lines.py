import itertools

from tvm_split.cli.link_lines import transport_lines


def test_both_ways_are_one_where_they_are_alike():
    links = [("a", "b", "shm"), ("b", "c", "grpc"), ("b", "a", "shm"), ("c", "b", "mpi"), ("c", "a", "")]
    links += [("d", "e", "nccl")]
    assert transport_lines(links) == [
        "Links over shared memory: a ↔ b",
        "Links over gRPC: b → c",
        "Links over MPI: c → b",
        "Links over NCCL: d → e",
    ]


def test_many_links_are_one_line():
    names = [str(number) for number in range(200)]
    (line,) = transport_lines((*ends, "grpc") for ends in itertools.permutations(names, 2))
    assert line.startswith("Links over gRPC: 0 ↔ 1, 0 ↔ 2, 0 ↔ 3, … 19894 more …,")
