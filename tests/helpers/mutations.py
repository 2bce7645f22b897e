"""Make wrong bytes: random ones, correct ones with changes, random frames, and random messages of protobuf."""

import json
import math
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from rpc_runtime.wire.framing import HEADER, MAGIC, PROTOCOL_VERSION, FrameKind

NUMBERS = (0, 1, 2, 3, 7, 63, 64, 255, 16_384, 16_385, 65_535, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "cpu", "cuda", "float32", "bool", "O", "V8", "client", "\0", "../../x", "a" * 3000, "ü\n\x1b[2J", "1e9")
WRONG_FILES = (b"", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"[" * 600 + b"]" * 600)
"""Contents that no reader accepts: not text, not JSON, nested too deeply, or a number with too many digits."""


def mutated(content: bytes, source: random.Random) -> bytes:
    """Return the bytes with some changes at random places: bits, bytes, cuts, copies, insertions."""
    data = bytearray(content)
    for _ in range(source.choice((1, 1, 2, 4, 16))):
        place, length = source.randrange(len(data) + 1), source.choice((1, 2, 4, 8, 64))
        match source.randrange(6):
            case 0 if place < len(data):
                data[place] ^= 1 << source.randrange(8)
            case 1 if place < len(data):
                data[place] = source.choice((0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)))
            case 2:
                del data[place : place + length]
            case 3:
                data[place:place] = data[place : place + length]
            case 4:
                data[place:place] = source.randbytes(length)
            case 5 if source.random() < 0.2:
                del data[place:]
            case _:
                data[place : place + length] = source.randbytes(length)
    return bytes(data)


def random_frame(source: random.Random, sequence: int, size_bytes: int) -> bytes:
    """Return a frame, in most cases of a tensor of this size; each field is wrong sometimes, or some bytes are."""
    payload = source.randbytes(source.choice((size_bytes, size_bytes, size_bytes, 0, 1, 4, 5000)))
    kind = source.choice((*FrameKind, FrameKind.TENSOR, FrameKind.TENSOR, FrameKind.TENSOR, 99))
    flags, tensor = source.choice((0, 0, 0, 1, 7)), source.choice((0, 0, 0, 1, 2**32 - 1))
    number, offset = source.choice((sequence, sequence, sequence, 0, 2**64 - 1)), source.choice((0, 0, 0, 1, 2**63))
    total = source.choice((len(payload), len(payload), 0, 2**63, 2**64 - 1))
    frame = HEADER.pack(MAGIC, PROTOCOL_VERSION, kind, flags, tensor, 0, number, offset, total) + payload
    return frame if source.random() < 0.8 else mutated(frame, source)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a JSON value with every key or index in it."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places(value[key])


def changed(content: Any, source: random.Random) -> bytes:
    """Change, remove, move or double some values of a JSON value; return it as bytes, sometimes with changed bytes."""
    for _ in range(source.choice((1, 1, 1, 2, 5))):
        all_places = list(places(content))
        if not all_places:
            break
        (holder, key), (from_holder, from_key) = source.choice(all_places), source.choice(all_places)
        values = (None, True, -1, 1.5, [], {}, [[]], *map(source.choice, (NUMBERS, TEXTS)), _number(source))
        value: Any = source.choice(values)
        match source.randrange(4):
            case 0:
                del holder[key]
            case 1:
                holder[key] = json.loads(json.dumps(from_holder[from_key]))
            case 2 if isinstance(holder, list):
                holder.insert(key, json.loads(json.dumps(holder[key])))
            case _:
                holder[key] = value
    text = json.dumps(content).encode()
    return mutated(text, source) if source.random() < 0.1 else text


def _number(source: random.Random) -> float:
    """Return a float near the limits of its range or between them, or one that JSON does not have."""
    numbers = (5e-324, 1e-308, 1e-18, 1e-9, 1e18, 1.1e18, 1e30, 1e200, 1.7e308, 10**400, -1e308)
    return source.choice((*numbers, math.inf, -math.inf, math.nan))


def random_message(kind: Any, source: random.Random, known_texts: tuple[str, ...], depth: int = 0) -> Any:
    """Return a message of a kind with random fields; some texts are among ``known_texts``, which have a meaning."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if source.random() < 0.25:
            continue
        if field.is_repeated:
            if depth < 3:
                count = source.choice((0, 1, 1, 2, 5, 40))
                values = [_value(message, field, source, known_texts, depth) for _ in range(count)]
                getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_value(message, field, source, known_texts, depth))
        else:
            setattr(message, field.name, _value(message, field, source, known_texts, depth))
    return message


def _value(message: Any, field: Any, source: random.Random, known_texts: tuple[str, ...], depth: int) -> Any:
    if field.message_type is not None:
        return random_message(field.message_type._concrete_class, source, known_texts, depth + 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        return source.choice(known_texts if known_texts and source.random() < 0.7 else TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return source.randbytes(source.choice((0, 1, 100, 5000)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return source.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return source.choice((0.0, -1.0, 0.01, 1e300, float("nan"), float("inf")))
    if field.type == FieldDescriptor.TYPE_ENUM:
        return source.choice(list(field.enum_type.values_by_number))
    limit = 2**32 if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_INT32) else 2**64
    return source.choice([number for number in NUMBERS if number < limit])
