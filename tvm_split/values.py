"""Reads and writes dataclasses as JSON files: validated by pydantic, written without default values.

Error messages give the file, the line and what is expected there::

    problem.json:4: links.0.bytes_per_second: must be greater than 0 (it is -1)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rpc_runtime.errors import TvmSplitError
from rpc_runtime.files import file_bytes
from tvm_split.outputs import write_text
from tvm_split.units import few_lines, meant_name

Value = TypeVar("Value")
Location = tuple[int | str, ...]
"""Location of a value in a file: keys and positions, such as ``("links", 2, "from")``."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""YAML loader; the one in C is twelve times as fast, if it is available."""
MOST_WITH_LINES = 20_000_000
"""The length in characters up to which errors name lines of a file; for longer files they name only the key."""
LONGEST_SHOWN = 60
"""The longest text of a value, in characters, that a message shows."""
UNKNOWN_KEY = "unexpected_keyword_argument"
"""Pydantic's type of the error for a key that is not a field of the dataclass."""
MESSAGES = {
    UNKNOWN_KEY: "there is no such key",
    "missing": "this key is missing",
    **dict.fromkeys(("dataclass_type", "dict_type", "mapping_type"), "must be a dictionary"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "too_short": "must have {min_length} or more entries",
    "string_type": "must be text, in quotes if it looks like something else",
    "path_type": "must be a path",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
}
"""Messages by pydantic's type of error, which replace pydantic's own messages for programmers."""


@dataclass(frozen=True)
class Document:
    """JSON content with its source; ``text`` is the text of its file, if any. ``error`` is the class that is raised."""

    source: str
    content: Any
    error: type[TvmSplitError]
    text: str | None = None

    @classmethod
    def read(cls, path: str | Path, error: type[TvmSplitError], *, without_nulls: bool = False) -> Document:
        """Read the document in a JSON file; ``without_nulls`` drops keys whose value is null.

        Raises:
            TvmSplitError: of the class ``error``: the file cannot be read, is not JSON, or has a duplicate key.
        """
        text = text_in(path, error)
        try:
            content = json.loads(text, object_pairs_hook=_without_nulls if without_nulls else _distinct)
        except json.JSONDecodeError as failure:
            problem = f"{failure.msg} (column {failure.colno})"
            raise error(f"{path}:{failure.lineno}: this is not valid JSON: {problem}") from None
        except (ValueError, RecursionError) as failure:
            raise error(f"{path}: this is not valid JSON: {failure}") from failure
        return cls(str(path), content, error, text)

    def value(self, form: type[Value]) -> Value:
        """Validate the document and return it as a value of type ``form``.

        Raises:
            TvmSplitError: the document is invalid; says what is wrong in which lines.
        """
        try:
            return cast(Value, adapter_of(form).validate_json(json.dumps(self.content, allow_nan=False)))
        except ValidationError as failure:
            wrong = [(problem["loc"], sentence(problem)) for problem in causes(failure)]
            raise self.complaint(wrong) from failure
        except (ValueError, RecursionError) as failure:
            wrong = [(location, "must be a finite number") for location in _not_finite(self.content)]
            unreadable = self.error(f"{self.source}: this is not valid JSON: {failure}")
            raise (self.complaint(wrong) if wrong else unreadable) from failure

    def complaint(self, wrong: Iterable[tuple[Location, str]]) -> TvmSplitError:
        """Return the error that says what is wrong, and in which lines of the file."""
        listed = list(wrong)
        lines = (
            f"{self.place(location)}: {'.'.join(str(step) for step in location if step != '[key]') or 'file'}: {text}"
            for location, text in listed
        )
        return self.error(few_lines(lines, len(listed)))

    def place(self, location: Location) -> str:
        """Return the source, with the line of a location in it if that is known, such as ``lab.yaml:4``."""
        return self.source if self._tree is None else f"{self.source}:{line_of(self._tree, location)}"

    @cached_property
    def _tree(self) -> yaml.Node | None:
        """The YAML node tree of the text, with line numbers; None if the text is missing, too long or not YAML."""
        if self.text is None or len(self.text) > MOST_WITH_LINES:
            return None
        try:
            # Tabs between tokens are valid in JSON, but not in YAML; JSON strings contain none.
            return yaml.compose(self.text.replace("\t", " "), Loader=LOADER)
        except (yaml.YAMLError, RecursionError):
            return None


def text_in(path: str | Path, error: type[TvmSplitError], what: str = "") -> str:
    """Return the text of a file; raises an ``error`` if it cannot be read or is binary."""
    try:
        return file_bytes(Path(path)).decode()
    except OSError as failure:
        raise error(f"cannot read {what}{path}: {failure.strerror or failure}") from failure
    except UnicodeDecodeError as failure:
        raise error(f"cannot read {what}{path}: this is not valid UTF-8") from failure


def read(form: type[Value], path: str | Path, error: type[TvmSplitError]) -> Value:
    """Read the value in a JSON file; errors as of `Document`."""
    return Document.read(path, error).value(form)


def content_of(value: Any) -> dict[str, Any]:
    """Return a value as JSON content, without fields that have their default."""
    return cast(
        dict[str, Any], adapter_of(type(value)).dump_python(value, mode="json", by_alias=True, exclude_defaults=True)
    )


def write(content: Any, path: str | Path) -> None:
    """Write the result of `content_of` as an indented JSON file. Raises `OutputError`."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def line_of(node: yaml.Node | None, location: Location) -> int:
    """Return the line (from 1) of the deepest existing node on the path to a location; JSON is read as YAML."""
    line = 1
    for step in location:
        if isinstance(node, yaml.MappingNode):
            entries = {key.value: (key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}
            if step not in entries:
                break
            key, node = entries[step]
            line = key.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
            line = node.start_mark.line + 1
        else:
            break
    return line


adapter_of: Callable[..., TypeAdapter[Any]] = cache(TypeAdapter)
"""Returns the adapter of a type, which is built once, since that takes milliseconds."""


def _not_finite(content: Any) -> Iterator[Location]:
    """Yield the locations of infinities and NaN, which Python reads but JSON does not have."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in entries:
        if isinstance(value, float) and not math.isfinite(value):
            yield (key,)
        yield from ((key, *rest) for rest in _not_finite(value))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as a dict; raises a ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = first_repeated(key for key, _ in pairs)
        raise ValueError(f"the key {twice!r} is there twice in one object; give it once")
    return content


def first_repeated(items: Iterable[str]) -> str | None:
    """Return the first of the items that occurs more than once; None if all are different."""
    return next((item for item, count in Counter(items).items() if count > 1), None)


def _without_nulls(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object as a dict without keys whose value is null; raises a ValueError if a key occurs twice."""
    return {key: value for key, value in _distinct(pairs).items() if value is not None}


def causes(failure: ValidationError) -> list[ErrorDetails]:
    """Return the errors of a failed validation; a missing key is merged with the unknown key that misspells it."""
    problems = failure.errors(include_url=False)
    for missing in [problem for problem in problems if problem["type"] == "missing"]:
        *place, key = missing["loc"]
        beside = [problem for problem in problems if [*problem["loc"][:-1]] == place]
        unknown = [problem for problem in beside if problem["type"] == UNKNOWN_KEY]
        wrong = [problem for problem in unknown if meant_name(problem["loc"][-1], [str(key)])] or unknown
        if wrong and (len(beside) == 2 or wrong is not unknown):
            problems[problems.index(wrong[0])] = {**wrong[0], "ctx": {"meant": key}}
            problems.remove(missing)
    return problems


def sentence(problem: ErrorDetails) -> str:
    """Return what is wrong, with the value if it is short and the message does not have it already."""
    text, value = text_of(problem), problem["input"]
    is_short = isinstance(value, str | int | float) and len(repr(value)) < LONGEST_SHOWN
    is_shown = isinstance(value, str) and repr(value) in text
    is_of_key = problem["type"] in (UNKNOWN_KEY, "missing")
    return f"{text} (it is {value!r})" if is_short and not is_shown and not is_of_key else text


def plain(message: str) -> str:
    """Return pydantic's message about a value in plain words."""
    text = message.replace("Value error, ", "").replace("Input should ", "must ")
    for kind, words in (("integer", "whole number"), ("boolean", "true or false")):
        text = text.replace(f"must be a valid {kind}, unable to parse string as an {kind}", f"must be a {words}")
    return text


def text_of(problem: ErrorDetails) -> str:
    """Return what is wrong, without the value."""
    message = plain(problem["msg"])
    known = MESSAGES.get(problem["type"])
    if known is None:
        return message
    context = problem.get("ctx", {})
    return known.format(**context) + (f"; did you mean {context['meant']!r}?" if "meant" in context else "")
