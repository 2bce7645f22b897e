import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import export, lax
from jaxlib.mlir import ir

from tests.helpers.frontends.comparison import assert_equal_to_source, run, run_as_stage
from tests.helpers.frontends.contract import assert_keeps_contract
from tvm_split.compiler.verification import first_differing_layer
from tvm_split.errors import ModelImportError
from tvm_split.frontends import load_model
from tvm_split.frontends.stablehlo.layer_names import words_of
from tvm_split.frontends.stablehlo.modules import in_context

WEIGHTS = np.random.default_rng(0).standard_normal((3, 4)).astype("float32")
X = np.random.default_rng(1).standard_normal((2, 3)).astype("float32")


def network(x: Any) -> Any:
    with jax.named_scope("hidden"):
        x = jnp.tanh(x @ WEIGHTS)
    with jax.named_scope("out"):
        return jax.nn.softmax(x)


def exported(batch: str | int = 2) -> export.Exported:
    shape = export.symbolic_shape(f"{batch}, 3")
    return export.export(jax.jit(network))(jax.ShapeDtypeStruct(shape, "float32"))


def text() -> str:
    return jax.jit(network).lower(X).as_text(debug_info=True)


REDUCTION = """func.func public @main(%x: tensor<256x3xi1>) -> tensor<3xi1> {{
  %initial = stablehlo.constant dense<{initial}> : tensor<i1>
  %result = stablehlo.reduce(%x init: %initial) applies stablehlo.{kind} across dimensions = [0]
      : (tensor<256x3xi1>, tensor<i1>) -> tensor<3xi1>
  return %result : tensor<3xi1>
}}"""


@pytest.mark.parametrize(("kind", "initial"), [("add", "false"), ("multiply", "true")])
def test_sums_and_products_of_booleans(kind: str, initial: str, tmp_path: Path) -> None:
    (tmp_path / "net.mlir").write_text(REDUCTION.format(kind=kind, initial=initial))
    x = np.ones((256, 3), bool)
    x[0, 1], x[:, 2] = False, False
    assert_equal_to_source(load_model(tmp_path / "net.mlir", (x,)), [x])


@pytest.mark.parametrize(
    "form", ["function", "jitted", "partial", "exported", "serialised", "text", "bytecode", "bytes"]
)
def test_forms_of_a_network(form: str, tmp_path: Path) -> None:
    bytecode = exported().mlir_module_serialized
    (tmp_path / "net.mlir").write_text(text())
    (tmp_path / "net.mlirbc").write_bytes(bytecode)
    (tmp_path / "net.jax").write_bytes(exported().serialize())
    source = {
        "function": network,
        "jitted": jax.jit(network),
        "partial": functools.partial(lambda weights, x: network(x) + weights["none"], {"none": np.zeros(4, "float32")}),
        "exported": exported(),
        "serialised": tmp_path / "net.jax",
        "text": tmp_path / "net.mlir",
        "bytecode": str(tmp_path / "net.mlirbc"),
        "bytes": bytecode,
    }[form]
    model = load_model(source, (X,))
    assert_keeps_contract(model)
    assert_equal_to_source(model, [X])
    np.testing.assert_allclose(model.reference.outputs([X])[0], network(X), rtol=1e-5)
    assert {"hidden", "out"} <= set(model.layer_names)


def test_arguments_may_be_nested_and_are_named() -> None:
    def mixed(pair: Any, *, scale: Any, negate: bool) -> Any:
        return {"sum": (pair["a"] + pair["b"][0]) * scale, "difference": -pair["a"] if negate else pair["a"]}

    arguments = {"pair": {"a": X, "b": [X + 1]}, "scale": np.float32(2), "negate": True}
    model = load_model(mixed, arguments)
    assert [spec.name for spec in model.inputs] == ["pair_a", "pair_b_0", "scale"]
    assert [spec.name for spec in model.outputs] == ["difference", "sum"]
    assert_equal_to_source(model, [X, X + 1, np.float32(2)])
    assert [spec.shape for spec in load_model(lambda *many: many[0] + many[1], (X, X)).inputs] == [(2, 3), (2, 3)]


def test_a_batch_repeats_the_examples() -> None:
    assert load_model(network, (X,), batch=5).inputs[0].shape == (5, 3)
    with pytest.raises(ModelImportError, match=r"batch=5 does not say which axes"):
        load_model(lambda x, y: x + y[0], (X, np.ones((3, 3), "float32")), batch=5)
    with pytest.raises(ModelImportError, match="dimensions are for exported functions"):
        load_model(network, (X,), dimensions={"b": 2})


def test_open_sizes_are_bound() -> None:
    source = exported("b")
    assert load_model(source, batch=3).outputs[0].shape == (3, 4)
    assert load_model(source, dimensions={"b": 4}).outputs[0].shape == (4, 4)
    assert load_model(source, (X,)).outputs[0].shape == (2, 4)
    assert_equal_to_source(load_model(source, (X,)), [X])
    with pytest.raises(ModelImportError, match=r"axis 0 of input 'input_0' \('b'\).*batch=1"):
        load_model(source)


def test_examples_are_needed_and_checked() -> None:
    with pytest.raises(ModelImportError, match="network is a function: give example_inputs"):
        load_model(network)
    with pytest.raises(
        ModelImportError, match=rf"JAX cannot trace network for inputs float32\[2, 5\].*{__file__}, line \d+"
    ):
        load_model(network, (np.ones((2, 5), "float32"),))


def test_files_that_are_no_modules_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.mlir").write_text("module { func.func")
    (tmp_path / "broken.jax").write_bytes(b"nothing")
    with pytest.raises(ModelImportError, match="cannot be read as a StableHLO module"):
        load_model(tmp_path / "broken.mlir")
    with pytest.raises(ModelImportError, match=r"broken\.jax.*jax\.export"):
        load_model(tmp_path / "broken.jax")


def scoped(function: Any) -> Any:
    def called(x: Any) -> Any:
        with jax.named_scope("block"), jax.named_scope("layer"):
            return function(x)

    return called


@pytest.mark.parametrize(
    ("function", "operator", "reason"),
    [
        (lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x), "while", "loops while it runs"),
        (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), "case", "chooses what to compute"),
        (lambda x: jnp.fft.fft(x).real, "fft", ""),
        (lambda x: jnp.linalg.cholesky(x @ x.T), "cholesky|custom_call|potrf", ""),
        (lambda x: jnp.linalg.inv(x @ x.T), "lapack_sgetrf", ""),
        (lambda x: lax.cumlogsumexp(x, 1), "reduce_window", "in a way of its own"),
        (lambda x: lax.population_count(x.astype("int32")), "popcnt", ""),
        (lambda x: jnp.bitwise_or.reduce(x.astype("int32")), "reduce", "bits of int32 by or"),
        (lambda x: lax.reduce_precision(x, 5, 3), "reduce_precision", "5 bits of exponent"),
        (lambda x: jax.random.uniform(jax.random.key(x[0, 0].astype("int32")), (3,)), "", ""),
    ],
    ids=["while", "branch", "fft", "cholesky", "inverse", "window", "popcnt", "bits", "precision", "random"],
)
def test_what_cannot_be_imported_is_refused_by_layer_and_operator(function: Any, operator: str, reason: str) -> None:
    with pytest.raises(ModelImportError, match=rf"(?s)({operator}).*{reason}.*block/layer|block/layer.*{reason}"):
        load_model(scoped(function), (X,))


def test_parts_of_complex_weights_are_computed_on_import() -> None:
    weights = jnp.asarray(WEIGHTS[:2, :3] + 1j * WEIGHTS[1:, :3])
    assert_equal_to_source(load_model(lambda x: x * weights.real + weights.imag, (X,)), [X])
    with pytest.raises(ModelImportError, match=r"complex<f32>.*in block/layer"):
        load_model(scoped(lambda x: (x * weights).real), (X,))


def test_a_choice_by_values_is_shown_with_its_line() -> None:
    def branch(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    line = branch.__code__.co_firstlineno + 1
    with pytest.raises(ModelImportError, match=rf"{__file__}, line {line}: return x if x.sum.*jax.numpy.where"):
        load_model(branch, (X,))


def test_all_that_cannot_be_imported_is_said_at_once() -> None:
    def both(x: Any) -> Any:
        with jax.named_scope("one"):
            x = lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x)
        with jax.named_scope("other"):
            return lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)

    with pytest.raises(ModelImportError, match=r"while .*in one.*; case .*in other"):
        load_model(both, (X,))


def test_known_integers_are_divided_as_xla_divides_while_it_runs() -> None:
    """XLA ends the process if it knows both operands at compile time."""
    for dtype in ("int8", "uint8", "int32"):
        least = np.iinfo(dtype).min
        left = np.array([7, least, least, 100, -100]).astype(dtype)
        right = np.array([0, -1, 3, -7, 7]).astype(dtype)
        zeros = np.zeros(5, dtype)
        model = load_model(lambda c, a=left, b=right: (c + lax.div(a, b), c + lax.rem(a, b)), (zeros,))
        for actual, expected in zip(run(model, [zeros]), (lax.div(left, right), lax.rem(left, right)), strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_nan_goes_through_a_stage_as_through_jax() -> None:
    x, y = np.float32([np.nan, -2, 1.5, 3, np.nan, 0.2]), np.ones(6, "float32")

    def bounded(a: Any, b: Any) -> Any:
        both = jnp.maximum(a, b), jnp.maximum(b, a), jnp.minimum(a, b), jnp.minimum(b, a)
        return *both, jax.nn.relu(a), jnp.maximum(a, 0.5), jnp.minimum(a, 0.5), jnp.clip(a, -1, 1), jnp.nan_to_num(a)

    assert_equal_to_source(load_model(bounded, (x, y)), [x, y], computed=run_as_stage)


def test_a_network_in_training_mode_is_refused() -> None:
    module = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    with pytest.raises(ModelImportError, match=r"training mode.*layers/1.*model\.eval\(\)"):
        load_model(module, (X,))
    module.eval()
    assert "layers/0" in load_model(module, (X,)).layer_names
    assert nnx.Linear.__call__.__qualname__ == "Linear.__call__"


class Counts(nnx.Module):
    """Multiplies by the number of its calls."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.count[...] += 1
        return x * self.count[...]


def decoding() -> nnx.Module:
    attention = nnx.MultiHeadAttention(1, 3, decode=True, rngs=nnx.Rngs(0))
    attention.init_cache((2, 5, 3))
    return attention


@pytest.mark.parametrize(("build", "path"), [(Counts, "0/count"), (decoding, "0/cache_index, steps/0/cached_key")])
def test_a_module_that_changes_its_state_is_refused(build: Any, path: str) -> None:
    class Steps(nnx.Module):
        def __init__(self) -> None:
            self.steps = nnx.List([build()])

        def __call__(self, x: Any) -> Any:
            return self.steps[0](x)

    x = X[:, None] if build is decoding else X
    with pytest.raises(ModelImportError, match=f"Steps changes steps/{path}.* keeps no state"):
        load_model(Steps(), (x,))


def test_a_linen_module_needs_its_variables() -> None:
    with pytest.raises(ModelImportError, match=r"Dense.*without its variables: give module\.bind\(variables\)"):
        load_model(linen.Dense(3), (X,))


def test_values_of_a_layer_lie_as_its_variables_hold_them() -> None:
    kernel = np.random.default_rng(0).standard_normal((3, 3, 2, 4)).astype("float32")

    def convolved(x: Any) -> Any:
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return (x + jnp.arange(4.0)).mean((1, 2), keepdims=True) * x

    image = np.random.default_rng(2).standard_normal((2, 5, 6, 2)).astype("float32")
    model = load_model(convolved, (image,))
    shapes = {
        binding.var.name: [int(size) for size in binding.var.ty.shape]
        for binding in model.module["main"].body.blocks[0].bindings
    }
    values = dict(model.reference.values([image]))
    assert values.keys() <= shapes.keys()
    assert all(list(value.shape) == shapes[name] for name, value in values.items())
    assert first_differing_layer(model, model.reference, (image,)) is None


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ('loc("jit(f)/Conv_0/add"("file.py":1:2))', ("jit(f)", "Conv_0", "add")),
        ('loc("file.py":1:2)', ()),
        ("loc(unknown)", ()),
        ('loc("jit(f)/vmap(block/layer)/dot"(unknown))', ("jit(f)", "block", "layer", "dot")),
        ('loc(fused["file.py":1:2, "a/b"])', ("a", "b")),
        ('loc(callsite("inner/op" at "outer"("file.py":1:2)))', ("outer", "inner", "op")),
        ('loc(fused["Conv2D:", "net/conv/Conv2D@__inference_1"])', ("net", "conv", "Conv2D")),
        ('loc("net/act/Relu;net/conv/Add"(unknown))', ("net", "conv", "Add")),
        ('loc("jit(f)/add:"("tanh"("file.py":1:2)))', ("jit(f)", "add:", "tanh")),
        (r'loc("gr\C3\B6\C3\9Fe \22a\22/b\\/c\09d/\FF"(unknown))', ('größe "a"', "b\\", "c\td", r"\xff")),
    ],
)
def test_locations_hold_the_user_s_words(location: str, words: tuple[str, ...]) -> None:
    with in_context():
        assert words_of(ir.Module.parse(f"module {{}} {location}").operation.location) == words


@pytest.mark.parametrize(
    "scopes",
    [
        ("body", "head"),
        ("scan", "while", "cond", "remat"),
        ("größe", "层"),
        ('say "hi"', "b\\c", "end\\", "c\td"),
        ("a@b", "a@c"),
        ("x;y", "z;y"),
        ("a->b", "conv(1", "next)"),
        ("add:", ":"),
    ],
)
def test_scopes_are_called_as_the_user_called_them(scopes: tuple[str, ...]) -> None:
    def several(x: Any) -> Any:
        for scope in scopes:
            with jax.named_scope(scope):
                x = jnp.tanh(x) * 2
        return x

    assert load_model(several, (X,)).layer_names == scopes


def test_what_jax_adds_of_loops_is_told_from_scopes_of_that_name() -> None:
    def cell(x: Any, _: Any = None) -> Any:
        with jax.named_scope("body"):
            return jnp.tanh(x) * 2, None

    def network(x: Any) -> Any:
        with jax.named_scope("while"):
            x = lax.scan(lambda c, _: lax.scan(cell, c, None, length=2), x, None, length=2)[0]
        with jax.named_scope("cond"):
            x = lax.cond(True, lambda c: cell(c)[0], lambda c: c, x)
        return lax.map(lambda row: cell(row)[0], x)

    assert set(load_model(network, (X,)).layer_names) >= {"while/body", "cond/body", "body"}
    assert not [name for name in load_model(network, (X,)).layer_names if "body/body" in name]


def test_modules_of_flax_may_be_called_as_jax_calls_loops() -> None:
    class Network(nnx.Module):
        def __init__(self) -> None:
            self.body, self.head, self.scan = (nnx.Linear(3, 3, rngs=nnx.Rngs(0)) for _ in range(3))

        def __call__(self, x: Any) -> Any:
            return self.scan(self.head(self.body(x)))

    assert load_model(Network(), (X,)).layer_names == ("body", "head", "scan")


def test_reading_text_needs_no_jax() -> None:
    code = "import sys; from tvm_split.frontends.stablehlo import importer\nassert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
