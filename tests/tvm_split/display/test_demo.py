import torch

import tvm_split
from tvm_split.demo.network import DigitNetwork, shards_over
from tvm_split.display.demo import short_form


def test_a_machine_s_ir_is_shown_in_short_lines() -> None:
    model = tvm_split.load_model(DigitNetwork().eval(), (torch.zeros(4, 3, 8, 8),))
    cluster = tvm_split.Cluster.in_process(2)
    split = {"machine-a": ["conv1"], "machine-b": ["flatten"]}
    bundle = tvm_split.compile(model, tvm_split.plan(model, cluster, split=split), verify=False)
    lines = short_form(bundle.ir["machine-b"]).splitlines()
    assert lines[1].split() == ["relu2", "=", 'receive("relu2",', '"machine-a")', "#", "float32[4,", "32,", "8,", "8]"]
    assert lines[-1].strip() == 'send(fc2_1, "fc2_1", "client")'
    assert max(map(len, lines)) <= 80
    shards = shards_over(("machine-a", "machine-b"))
    plan = tvm_split.plan(model, tvm_split.Cluster.local(2), shards=shards)
    text = short_form(tvm_split.compile(model, plan, verify=False).ir["machine-b"])
    assert "relu1_machine_b_halo_for_machine_a = strided_slice(relu1_machine_b" in text
