"""Convert Flax modules to functions of JAX whose operations carry the modules' names as scopes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from tvm_split.errors import ModelImportError
from tvm_split.frontends.stablehlo.layer_names import Naming, as_they_are, below_the_network
from tvm_split.units import short_list


@dataclass(frozen=True)
class Function:
    """A function to trace, its name ("": the caller chooses), and the naming that converts paths to layers."""

    call: Callable[..., Any]
    name: str = ""
    naming: Naming = as_they_are


def function_of(source: Any) -> Function:
    """Return the function for a source: a function, a module of flax.nnx, or a bound module of flax.linen.

    Raises ModelImportError for other sources, unbound modules, and modules in training mode.
    """
    # Flax is not imported here: a module of Flax has already imported it.
    linen, nnx = sys.modules.get("flax.linen"), sys.modules.get("flax.nnx")
    if linen is not None and isinstance(source, linen.Module):
        if source.scope is None:
            raise ModelImportError(
                f"{type(source).__name__} is a module of flax.linen without its variables: give "
                "module.bind(variables), or functools.partial(module.apply, variables)"
            )
        module, variables = source.unbind()
        # linen names a network's own scope after its class.
        return Function(functools.partial(module.apply, variables), type(module).__name__, below_the_network)
    if nnx is not None and isinstance(source, nnx.Module):
        _check_evaluation_mode(source, nnx)
        return Function(_nnx_function(source, nnx), type(source).__name__)
    if callable(source):
        return Function(source)
    raise ModelImportError(f"{type(source).__name__} is neither a function nor a module of Flax")


def _check_evaluation_mode(module: Any, nnx: Any) -> None:
    training = [
        _shown(path) or type(part).__name__
        for path, part in nnx.iter_modules(module)
        if getattr(part, "use_running_average", True) is False
        or (getattr(part, "deterministic", True) is False and _drops(part))
    ]
    if training:
        raise ModelImportError(
            f"{type(module).__name__} is in training mode, which changes what these layers compute: "
            f"{short_list(training)}. Call model.eval() first"
        )


def _drops(part: Any) -> bool:
    return any(getattr(part, name, None) for name in ("rate", "dropout_rate"))


def _nnx_function(module: Any, nnx: Any) -> Callable[..., Any]:
    graph, state = nnx.split(module)

    def call(*arguments: Any, **keywords: Any) -> Any:
        # Each trace gets its own copy, since it may write to counters and statistics.
        own = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, state))
        paths = {id(part): path for path, part in nnx.iter_modules(own)}
        with _naming(paths, {type(part) for _, part in nnx.iter_modules(own)}):
            return own(*arguments, **keywords)

    return call


@contextmanager
def _naming(paths: dict[int, tuple[Any, ...]], classes: set[type]) -> Iterator[None]:
    """Patch the modules' classes inside the block: each call runs in JAX scopes named by the module's path."""
    around: list[tuple[Any, ...]] = [()]

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def scoped(self: Any, *arguments: Any, **keywords: Any) -> Any:
            path = paths.get(id(self), ())
            outer = around[-1]
            within = path[len(outer) :] if path[: len(outer)] == outer else path
            with ExitStack() as scopes:
                for word in within:
                    scopes.enter_context(jax.named_scope(str(word)))
                around.append(path)
                try:
                    return call(self, *arguments, **keywords)
                finally:
                    around.pop()

        return scoped

    own = {each: each.__dict__["__call__"] for each in classes for each in each.__mro__ if "__call__" in each.__dict__}
    try:
        for each, call in own.items():
            type.__setattr__(each, "__call__", named(call))
        yield
    finally:
        for each, call in own.items():
            type.__setattr__(each, "__call__", call)


def _shown(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))
