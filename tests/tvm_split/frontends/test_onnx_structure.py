"""ONNX models with functions, branches and sequences, which become straight-line networks of tensors."""

import re

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

from tests.helpers.frontends.comparison import assert_equal_to_source, run_as_stage
from tests.helpers.frontends.onnx_cases import node_model, random
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model

X = random(2, 1, 3)


def parsed(graph: str, functions: str = "") -> onnx.ModelProto:
    model: onnx.ModelProto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 18, "own" : 1]> {graph} {functions}'
    )
    return model


LEAK = """
<domain: "own", opset_import: ["" : 18]>
leak <alpha: float = 0.25> (x) => (y) { y = LeakyRelu <alpha: float = @alpha> (x) }
"""
TWICE = """
<domain: "own", opset_import: ["" : 18, "own" : 1]>
twice <alpha: float = 0.5> (x) => (y) { h = own.leak (x)  y = own.leak <alpha: float = @alpha> (h) }
"""


@pytest.mark.parametrize("call", ["own.leak", "own.leak <alpha = 0.125>", "own.twice", "own.twice <alpha = 0.75>"])
def test_attributes_of_functions_have_their_defaults(call: str) -> None:
    model = parsed(f"g (float[2,1,3] x) => (float[2,1,3] y) {{ y = {call} (x) }}", LEAK + TWICE)
    assert_equal_to_source(load_model(model), [X])


PASSED_ON = """
<domain: "own", opset_import: ["" : 18, "own" : 1]>
outer <q> (x) => (y) {
  h = own.middle <alpha: float = @q> (x)
  one = Constant <value = bool {1}> ()
  y = If (one) <
    then_branch = t () => (r) { r = own.leak <alpha: float = @q> (h) },
    else_branch = e () => (r) { r = LeakyRelu <alpha: float = @q> (h) }
  >
}
<domain: "own", opset_import: ["" : 18, "own" : 1]>
middle <alpha> (x) => (y) { y = own.leak <alpha: float = @alpha> (x) }
"""


@pytest.mark.parametrize("attributes", ["", "<q = 0.75>"])
def test_a_function_passes_on_an_attribute_that_its_caller_may_leave_out(attributes: str) -> None:
    model = parsed(f"g (float[2,1,3] x) => (float[2,1,3] y) {{ y = own.outer {attributes} (x) }}", LEAK + PASSED_ON)
    assert_equal_to_source(load_model(model), [X])


def test_functions_that_call_themselves_are_refused() -> None:
    function = '<domain: "own", opset_import: ["" : 18, "own" : 1]> f (x) => (y) { y = own.f (x) }'
    with pytest.raises(ModelImportError, match="model is inconsistent"):
        load_model(parsed("g (float[2,1,3] x) => (float[2,1,3] y) { y = own.f (x) }", function))


SQUEEZED = """
g (float[N,M,3] x) => (y) <int64 middle = {1}> {
  sizes = Shape (x)
  size = Gather <axis = 0> (sizes, middle)
  one = Constant <value = int64 {1}> ()
  is_one = Equal (size, one)
  y = If (is_one) <
    then_branch = t () => (s) <int64[1] axis = {1}> { s = Squeeze (x, axis) },
    else_branch = e () => (s) { s = Identity (x) }
  >
}
"""
"""What torch writes for ``squeeze(1)`` of an open size."""


@pytest.mark.parametrize("middle", [1, 2])
def test_a_branch_that_bound_sizes_decide_is_taken(middle: int) -> None:
    x = random(2, middle, 3)
    model = load_model(parsed(SQUEEZED), [x])
    assert model.outputs[0].shape == ((2, 3) if middle == 1 else (2, 2, 3))
    assert_equal_to_source(model, [x])


@pytest.mark.parametrize(
    "sequence",
    [
        "SplitToSequence <axis = 2> (x, two)",
        "SplitToSequence <axis = 2> (h, sizes)",
        "SequenceConstruct (x, h, x)",
        "SequenceInsert (pair, x)",
        "SequenceErase (triple, place)",
    ],
)
def test_a_branch_that_the_length_of_a_sequence_decides_is_taken(sequence: str) -> None:
    model = parsed(
        f"""
        g (float[2,1,6] x, int64 place) => (y) <int64 two = {{2}}, int64 last = {{-1}}, int64[3] sizes = {{1, 3, 2}}> {{
          h = Neg (x)
          pair = SequenceConstruct (x, h)
          triple = SequenceConstruct (h, x, h)
          s = {sequence}
          length = SequenceLength (s)
          is_long = Greater (length, two)
          y = If (is_long) <
            then_branch = t () => (r) {{ r = ConcatFromSequence <axis = 2> (s) }},
            else_branch = e () => (r) {{ r = Exp (h) }}
          >
        }}
        """
    )
    assert_equal_to_source(load_model(model), [random(2, 1, 6), np.int64(0)])


def test_branches_that_a_weight_decides_keep_their_names_apart() -> None:
    """Branches inside branches, equal names, weights of a branch, and results from outside of it."""
    model = parsed(
        """
        g (float[2,1,3] x) => (y, z, w, v) <bool yes = {1}, bool no = {0}> {
          h = Relu (x)
          y, z = If (yes) <
            then_branch = a () => (p, q) <float[3] c = {1, 2, 3}> {
              t = Mul (h, c)
              p = If (no) <
                then_branch = aa () => (r) { r = Neg (t) },
                else_branch = ab () => (r) <float[3] d = {3, 2, 1}> { u = Sub (t, d)  r = Mul (u, c) }
              >
              q = Identity (c)
            },
            else_branch = b () => (p, q) { p = Identity (x)  q = Identity (x) }
          >
          w, v = If (no) <
            then_branch = c () => (p, q) { p = Identity (x)  q = Identity (x) },
            else_branch = d () => (p, h) <float[3] c = {5, 6, 7}> { t = Add (x, c)  p = Exp (t) }
          >
        }
        """
    )
    assert_equal_to_source(load_model(model), [X])


def test_a_function_is_called_inside_a_branch() -> None:
    branches = "then_branch = a () => (r) { r = own.leak (x) }, else_branch = b () => (r) { r = Neg (x) }"
    text = f"g (float[2,1,3] x) => (float[2,1,3] y) <bool yes = {{1}}> {{ y = If (yes) <{branches}> }}"
    assert_equal_to_source(load_model(parsed(text, LEAK)), [X])


def test_a_branch_that_data_decide_is_refused() -> None:
    branches = "then_branch = a () => (r) { r = Exp (x) }, else_branch = b () => (r) { r = Neg (x) }"
    text = f"g (float[2] x, bool which) => (float[2] y) {{ y = If (which) <{branches}> }}"
    with pytest.raises(ModelImportError, match=r"If \(it chooses what to compute while it runs\)"):
        load_model(parsed(text))


@pytest.mark.parametrize(
    "body",
    [
        "s = SplitToSequence <axis = 2> (x)  y = SequenceAt (s, two)",
        "s = SplitToSequence <axis = 2, keepdims = 0> (x)  y = SequenceAt (s, last)",
        "s = SplitToSequence <axis = 2> (x, two)  y = SequenceAt (s, last)",
        "s = SplitToSequence <axis = 2> (x, sizes)  y = SequenceAt (s, two)",
        "s = SplitToSequence <axis = 2> (x, sizes)  y = ConcatFromSequence <axis = 2> (s)",
        "s = SequenceConstruct (x, h)  y = ConcatFromSequence <axis = 1, new_axis = 1> (s)",
        "s = SequenceConstruct (x, h)  t = SequenceInsert (s, x, last)  y = ConcatFromSequence <axis = 1> (t)",
        "e = SequenceEmpty ()  s = SequenceInsert (e, x)  t = SequenceInsert (s, h)  y = SequenceAt (t, last)",
        "s = SequenceConstruct (x, h)  t = SequenceErase (s, last)  y = SequenceAt (t, last)",
    ],
)
def test_sequences_of_known_length(body: str) -> None:
    weights = "int64 two = {2}, int64 last = {-1}, int64[3] sizes = {1, 3, 2}"
    x = random(2, 1, 6)
    assert_equal_to_source(load_model(parsed(f"g (float[2,1,6] x) => (y) <{weights}> {{ h = Neg (x)  {body} }}")), [x])


def test_a_sequence_is_no_output() -> None:
    with pytest.raises(ModelImportError, match=r"output 's' is a sequence"):
        load_model(parsed("g (float[2,1,6] x) => (seq(float[2,1,1]) s) { s = SplitToSequence <axis = 2> (x) }"))


@pytest.mark.parametrize(("dtype", "name"), [("float8e4m3fn", "float8_e4m3fn"), ("int4", "int4"), ("uint4", "uint4")])
def test_values_of_small_types_are_refused(dtype: str, name: str) -> None:
    kind = getattr(onnx.TensorProto, dtype.upper())
    text = f"g (float[4] x) => (float[4] y) {{ h = Cast <to = {kind}> (x)  y = Cast <to = 1> (h) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    with pytest.raises(ModelImportError, match=re.escape(f"Cast (it has values of {name}, which cannot be computed")):
        load_model(model)


def test_weights_of_small_types_are_computed_on_import() -> None:
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.INT4, [4], np.int8([-8, 7, 1, 0]))
    model = parsed("g (float[4] x) => (float[4] y) <float s = {0.5}> { h = DequantizeLinear (w, s)  y = Mul (x, h) }")
    model.graph.initializer.append(weight)
    model.opset_import[0].version = 21
    assert_equal_to_source(load_model(model), [random(4)])


@pytest.mark.parametrize("operator", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers_are_refused_with_a_remedy(operator: str) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[operator]
    weights = [random(1, gates * 2, 3), random(1, gates * 2, 2)]
    model = node_model(operator, [random(4, 1, 3)], constants=weights, hidden_size=2)
    with pytest.raises(ModelImportError, match=rf"{operator} \(its steps are a loop; load the torch module"):
        load_model(model)


def chain_of(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x", "y")]
    graph = helper.make_graph([*nodes], "chain", tensors[:1], tensors[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


FIRST, SECOND = helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Neg", ["a"], ["y"])


def test_nodes_may_be_in_any_order() -> None:
    x = np.float32([[1, -2, 3], [0, 4, -5]])
    model = load_model(chain_of(SECOND, FIRST))
    np.testing.assert_array_equal(run_as_stage(model, [x])[0], -np.maximum(x, 0))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "no node makes output 'y'"),
        ([FIRST], "no node makes output 'y'"),
        ([SECOND], "no node makes tensor 'a', which Neg reads"),
        ([helper.make_node("Add", ["x", "y"], ["a"]), SECOND], "needs its own result"),
        ([FIRST, SECOND, SECOND], "two nodes make tensor 'y'"),
    ],
)
def test_graphs_that_are_not_connected_are_refused(nodes: list[onnx.NodeProto], message: str) -> None:
    with pytest.raises(ModelImportError, match=message):
        load_model(chain_of(*nodes))
