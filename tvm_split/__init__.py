"""Split a neural network over unequal machines, compile each part for its machine, and run them as one pipeline.

    import tvm_split

    with tvm_split.compile_and_deploy(network, (x,), tvm_split.Cluster.local(workers=2)) as deployment:
        (y,) = deployment.run(x)

The public names are those of ``__init__.pyi``. Each is loaded on first use, so that a worker starts without the
compiler, which it does not need.
"""

import ast
import functools
import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

__version__ = "0.1.0"

_FOLDER = Path(__file__).parent
_BESIDE = ("relay_passes", "rpc_runtime", "schedules")
"""Packages of this project that are installed under their own names."""


def require_own_packages() -> None:
    """Raise an ImportError if another module hides a package of this project with the same name."""
    for name in _BESIDE:
        spec = find_spec(name)
        origin = Path((spec and spec.origin) or "")
        if origin.resolve() != (_FOLDER.parent / name / "__init__.py").resolve():
            raise ImportError(
                f"{str(origin)!r} hides the package {name!r} of tvm-split: rename that file, or run from another folder"
            )


require_own_packages()
_MODULE_OF_NAME = {
    alias.name: statement.module or ""
    for statement in ast.parse((_FOLDER / "__init__.pyi").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
__all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'tvm_split' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF_NAME[name]), name)
    globals()[name] = value = _validating(value) if isinstance(value, FunctionType) else value
    return value


def _validating(function: FunctionType) -> Any:
    """Return ``function``, wrapped to raise an `InputError` for arguments that do not fit its signature or types."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        from tvm_split.parameters import fitting

        fit = functools.partial(fitting, function)
        arguments = (*map(fit, names, arguments), *arguments[len(names) :])
        named = {name: fit(name, value) for name, value in named.items()}
        try:
            return function(*arguments, **named)
        except TypeError:
            try:
                inspect.signature(function).bind(*arguments, **named)
            except TypeError as misfit:
                from rpc_runtime.errors import InputError

                raise InputError(f"tvm_split.{function.__name__}: {misfit}; it takes {', '.join(names)}") from None
            raise

    return call


def __dir__() -> list[str]:
    return sorted(__all__)
