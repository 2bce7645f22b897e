import contextlib
import os

import ml_dtypes
import numpy as np
import pytest

from rpc_runtime.errors import InputError
from rpc_runtime.program.runner import Outputs
from rpc_runtime.program.specs import TensorSpec
from tvm_split.cli.inputs import inputs_from_file, random_inputs, save_outputs
from tvm_split.compiler.rows import Rows

TWO = (TensorSpec("ids", (4,), "int64"), TensorSpec("mask", (4,), "float32"))


def test_random_inputs_are_the_same_every_time():
    first, second = (list(random_inputs(TWO, 2).stream(1)) for _ in range(2))
    assert [array.dtype.name for array in first[0]] == ["int64", "float32"]
    assert set(first[0][0].tolist()) <= {0, 1}
    for arrays, same_arrays in zip(first, second, strict=True):
        np.testing.assert_array_equal(arrays[1], same_arrays[1])
    assert not np.array_equal(first[0][1], first[1][1])


def test_arrays_in_order_are_one_micro_batch(tmp_path):
    np.savez(tmp_path / "in.npz", np.arange(4), np.ones(4, np.float32))
    fed = inputs_from_file(TWO, tmp_path / "in.npz", Rows())
    ((ids, mask),) = fed.stream(1)
    assert ids.tolist() == [0, 1, 2, 3]
    assert mask.tolist() == [1, 1, 1, 1]


def test_arrays_under_the_names_that_the_model_itself_has(tmp_path):
    """ONNX calls inputs ``in/put:0``, which are ``in_put_0`` here."""
    expected = (TensorSpec("in_put_0", (4,), "int64"), TensorSpec("mask", (4,), "float32"))
    np.savez(tmp_path / "in.npz", **{"in/put:0": np.arange(4), "mask": np.ones(4, np.float32)})
    ((first, _),) = inputs_from_file(expected, tmp_path / "in.npz", Rows()).stream(1)
    assert first.tolist() == [0, 1, 2, 3]
    np.savez(tmp_path / "in.npz", **{"in/put:0": np.arange(4), "in_put:0": np.arange(4)})
    with pytest.raises(InputError, match="has the arrays in/put:0, in_put:0; the model takes"):
        inputs_from_file(expected[:1], tmp_path / "in.npz", Rows())


def test_outputs_of_any_name(tmp_path):
    save_outputs(tmp_path / "out.npz", [Outputs((np.zeros(1), np.ones(2)), ("file", "a/b"))])
    with np.load(tmp_path / "out.npz") as content:
        assert {name: content[name].shape for name in content.files} == {"file": (1, 1), "a/b": (1, 2)}


def test_a_leading_axis_is_several_micro_batches(tmp_path):
    np.savez(tmp_path / "in.npz", ids=np.arange(12).reshape(3, 4), mask=np.ones((3, 4), np.float32))
    fed = inputs_from_file(TWO, tmp_path / "in.npz", Rows())
    assert fed.count == 3
    assert [ids.tolist()[0] for ids, _ in fed.stream(2)] == [0, 4, 8, 0, 4, 8]


def test_different_numbers_of_micro_batches(tmp_path):
    np.savez(tmp_path / "in.npz", ids=np.arange(12).reshape(3, 4), mask=np.ones(4, np.float32))
    with pytest.raises(InputError, match="ids: 3, mask: one"):
        inputs_from_file(TWO, tmp_path / "in.npz", Rows())


@pytest.mark.parametrize("content", [b"no file of numpy", b""])
def test_something_else_than_an_npz_file(tmp_path, content):
    (tmp_path / "in.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"in\.npz"):
        inputs_from_file(TWO, tmp_path / "in.npz", Rows())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_file_is_named(tmp_path, save):
    """Each byte in turn is wrong, or is the last; numpy and zipfile then raise errors of ten classes."""
    path = tmp_path / "in.npz"
    save(path, ids=np.zeros(4, np.int64), mask=np.ones(4, np.float32))
    content = path.read_bytes()
    damaged = [content[:place] for place in range(1, len(content), 7)]
    damaged += [content[:place] + b"\xff" + content[place + 1 :] for place in range(0, len(content), 3)]
    for wrong in damaged:
        path.write_bytes(wrong)
        with contextlib.suppress(InputError):  # some bytes mean nothing, such as a date
            inputs_from_file(TWO, path, Rows())


def test_nobody_waits_for_a_pipe(tmp_path):
    for name in ("in.npz", "in.npy"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(InputError, match=rf"cannot read .*{name}: it is a pipe, socket or device"):
            inputs_from_file(TWO, tmp_path / name, Rows())


def test_a_single_array_is_refused(tmp_path):
    np.save(tmp_path / "in.npy", np.arange(4))
    with pytest.raises(InputError, match=r"numpy\.savez"):
        inputs_from_file(TWO, tmp_path / "in.npy", Rows())


def test_bfloat16_comes_in_by_its_bytes_and_goes_out_as_float32(tmp_path):
    values = np.arange(4).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "in.npz", x=values)
    ((x,),) = inputs_from_file((TensorSpec("x", (4,), "bfloat16"),), tmp_path / "in.npz", Rows()).stream(1)
    np.testing.assert_array_equal(x, values)
    assert save_outputs(tmp_path / "out.npz", 2 * [Outputs((x,), ("y",))]) == {"y": [2, 4]}
    assert np.load(tmp_path / "out.npz")["y"].dtype == np.float32


def test_rows_are_parts_whose_outputs_are_joined(tmp_path):
    table = TensorSpec("table", (2, 3), "float32")
    rows = Rows((True, True, False), (0, 1), mixed="")
    ids, mask = np.arange(10), np.ones(10, np.float32)
    np.savez(tmp_path / "in.npz", ids=ids, mask=mask, table=np.ones((2, 3), np.float32))
    fed = inputs_from_file((*TWO, table), tmp_path / "in.npz", rows)
    assert [[ids.tolist(), table.shape] for ids, _, table in fed.stream(1)] == [
        [[0, 1, 2, 3], (2, 3)],
        [[4, 5, 6, 7], (2, 3)],
        [[8, 9], (2, 3)],
    ]
    results = [Outputs((ids, np.stack([ids, ids])), ("y", "z")) for ids, *_ in fed.stream(1)]
    assert save_outputs(tmp_path / "out.npz", results, fed.rows) == {"y": [10], "z": [2, 10]}
    np.savez(tmp_path / "in.npz", ids=ids[:0], mask=mask[:0], table=np.ones((2, 3), np.float32))
    with pytest.raises(InputError, match="holds no rows"):
        inputs_from_file((*TWO, table), tmp_path / "in.npz", rows)
