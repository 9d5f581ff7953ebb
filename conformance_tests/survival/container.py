"""Files taken apart and put together again: checkpoints (.npz), records (.safetensors).

What stands here is independent of the core's reader: it writes any dtype and any shape,
also those that the reader must refuse.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import numpy as np

DOCUMENT = "checkpoint.json"
RECORD = "kfac_core_record"
CODES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<V2"},
    **{"I64": "<i8", "I32": "<i4", "U8": "|u1"},
}


@dataclass
class Container:
    """The parts of a file, to be changed in place.

    Attributes
    ----------
    document : object
        The JSON document.
    tensors : dict of str to (str, list of int, bytes)
        Dtype, shape and data by name.
    """

    document: Any
    tensors: dict[str, tuple[str, list[int], bytes]]


def opened(data: bytes, /, *, key: str = DOCUMENT) -> Container:
    """Take a file apart; whatever is no sound file raises."""
    if key == DOCUMENT:
        return _opened_checkpoint(data)
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    document = json.loads(header.pop("__metadata__")[key])
    base = 8 + length
    tensors = {}
    for name, part in header.items():
        start, end = part["data_offsets"]
        values = data[base + start : base + end]
        tensors[name] = (part["dtype"], list(part["shape"]), values)
    return Container(document, tensors)


def sealed(
    container: Container, /, *, key: str = DOCUMENT, listed: bool = True
) -> bytes:
    """Put a file together; `listed` puts its tensors into a checkpoint's document."""
    document, tensors = container.document, container.tensors
    if key == DOCUMENT:
        if listed and isinstance(document, dict):
            document["tensors"] = {name: k for k, name in enumerate(tensors)}
        members = {DOCUMENT: json.dumps(document).encode()}
        members |= {f"{k}.npy": _npy(*part) for k, part in enumerate(tensors.values())}
        return archived(members)
    header: dict[str, Any] = {"__metadata__": {key: json.dumps(document)}}
    position = 0
    for name, (dtype, shape, values) in tensors.items():
        offsets = [position, position + len(values)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        position += len(values)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + b"".join(p[2] for p in tensors.values())


def archived(
    members: dict[str, bytes], /, *, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """Return a zip archive of some members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def _opened_checkpoint(data: bytes) -> Container:
    names = {np.dtype(code): name for name, code in CODES.items()}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        document = json.loads(archive.read(DOCUMENT))
        tensors = {}
        for name, index in document["tensors"].items():
            x = np.load(io.BytesIO(archive.read(f"{index}.npy")))
            tensors[name] = (names[x.dtype], list(x.shape), x.tobytes())
    return Container(document, tensors)


def _npy(dtype: str, shape: list[int], values: bytes) -> bytes:
    file = io.BytesIO()
    header = {"descr": CODES[dtype], "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + values
