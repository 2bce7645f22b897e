"""Reads the single tensor of a weight's safetensors file, for every dtype of TVM, without a copy.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the little-endian length of a JSON header, the
header, then the tensors' bytes. The safetensors package's numpy loader does not know bfloat16 and the float8 types.
"""

from __future__ import annotations

import json
import operator

from rpc_runtime.errors import BlobError
from rpc_runtime.program.program import TensorSpec
from rpc_runtime.program.runner import Bytes

WEIGHT_KEY = "weight"
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def single_tensor(content: Bytes, expected: TensorSpec) -> Bytes:
    """Return the bytes of the tensor named ``weight``.

    Raises:
        BlobError: the file is damaged, or its tensor has another shape or dtype than ``expected``.
    """
    try:
        length = int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8 : 8 + length].tobytes())
        entry = header[WEIGHT_KEY]
        begin, end = map(operator.index, entry["data_offsets"])
        data = content[8 + length + begin : 8 + length + end]
        dtype, shape = _DTYPES.get(entry["dtype"], str(entry["dtype"])), tuple(entry["shape"])
        names = set(header) - {"__metadata__"}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise BlobError(f"this is no safetensors file with a tensor named {WEIGHT_KEY!r} ({error!r})") from error
    if names != {WEIGHT_KEY}:
        raise BlobError(f"a weight's file holds one tensor named {WEIGHT_KEY!r}, this one holds {sorted(names)}")
    if (shape, dtype) != (expected.shape, expected.dtype):
        raise BlobError(f"the stage takes {expected}, and the file holds {dtype}[{', '.join(map(str, shape))}]")
    if begin < 0 or data.size != expected.size_bytes:
        raise BlobError(f"the file is cut: {data.size} of {expected.size_bytes} bytes")
    return data
