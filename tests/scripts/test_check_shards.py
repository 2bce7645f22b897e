"""What check-shards does with a way that is refused."""

from __future__ import annotations

import tvm_split
from scripts.check_shards import Checked, network, told


def test_a_way_that_is_refused_is_a_result_like_others() -> None:
    with tvm_split.Cluster.in_process(machines=3) as cluster:
        checked = Checked("resnet", *network("resnet", 224, 128), samples=1)
        row = checked.check(cluster, "rows", "fused", (0.5, 0.3, 0.2), 1)
    assert not row["good"]
    assert told(row).startswith("refused: stage_0 on machine-a, machine-b, machine-c cannot be shared: ")
    assert "has 2 rows for 3 machines" in told(row)
