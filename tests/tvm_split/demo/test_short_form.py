import torch

from schedules.traits import traits_of
from tvm_split.cluster.cluster import Cluster
from tvm_split.compiler.sharding import partition
from tvm_split.compiler.targets import tvm_target
from tvm_split.demo.network import DigitNetwork, shards_over, split_over
from tvm_split.demo.short_form import short_form
from tvm_split.frontends import load_model
from tvm_split.planning import plan

SECOND_MACHINE = """\
def stage_1():  # on machine-b
    relu1 = receive("relu1", "machine-a")               # float32[4, {blocks}, 8, 8, {lanes}]
    relu1_plain = layout_transform(relu1)               # float32[4, 32, 8, 8]
    conv2 = nn.conv2d(relu1_plain, constant[32, 32, 3, 3]) # float32[4, 32, 8, 8]
    conv2_1 = add(conv2, constant[1, 32, 1, 1])         # float32[4, 32, 8, 8]
    relu2 = nn.relu(conv2_1)                            # float32[4, 32, 8, 8]
    send(relu2, "machine-c")"""


def test_what_the_second_machine_does():
    cluster = Cluster.local(workers=3)
    model = load_model(DigitNetwork().eval(), (torch.zeros(4, 3, 8, 8),))
    planned = plan(model, cluster, split=split_over(cluster.machine_names))
    lanes = traits_of(tvm_target(planned.machine("machine-b").target)).lanes
    expected = SECOND_MACHINE.format(blocks=32 // lanes, lanes=lanes)
    assert short_form(partition(model, planned).machine_modules()["machine-b"]) == expected


def test_numbers_are_not_those_of_tvm():
    cluster = Cluster.local(workers=2)
    model = load_model(DigitNetwork().eval(), (torch.zeros(4, 3, 8, 8),))
    planned = plan(model, cluster, shards=shards_over(cluster.machine_names))
    text = short_form(partition(model, planned).machine_modules()["machine-b"])
    assert "relu1_machine_b_halo_for_machine_a = strided_slice(relu1_machine_b, (2), (0), (1))" in text
    assert "T.int64" not in text
