"""A .safetensors file taken apart and put together again, by the format's description.

Eight bytes with the length of a JSON header, the header, and the tensors' bytes.  What
stands here is independent of the library that reads such files, and of the core.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

DOCUMENT = "kfac_core_checkpoint"
RECORD = "kfac_core_record"
DIGEST = "kfac_core_checkpoint_sha256"
NUMPY = {"F64": "float64", "F32": "float32", "I32": "int32"}


@dataclass
class Container:
    """The parts of a file, to be changed in place.

    Attributes
    ----------
    document : object
        The JSON document of a checkpoint.
    tensors : dict of str to (str, list of int, bytes)
        Dtype, shape and data by name.
    """

    document: Any
    tensors: dict[str, tuple[str, list[int], bytes]]


def opened(data: bytes, /, *, key: str = DOCUMENT) -> Container:
    """Take a file apart; whatever is no sound file raises."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    document = json.loads(header.pop("__metadata__")[key])
    base = 8 + length
    tensors = {}
    for name, part in header.items():
        start, end = part["data_offsets"]
        values = data[base + start : base + end]
        tensors[name] = (part["dtype"], list(part["shape"]), values)
    if key == DOCUMENT:
        # Equal tensors are in the file once; here each stands for itself.
        digests = document["digests"]
        of_digest = {digests[name]: part for name, part in tensors.items()}
        tensors = {name: of_digest[found] for name, found in digests.items()}
    return Container(document, tensors)


def sealed(
    container: Container, /, *, key: str = DOCUMENT, digests: bool = True
) -> bytes:
    """Put a file together, with digests that are right for what it holds now."""
    document, tensors = container.document, container.tensors
    if digests and isinstance(document, dict):
        document["digests"] = {n: digest(*part) for n, part in tensors.items()}
    text = json.dumps(document)
    metadata = {key: text}
    if key == DOCUMENT:
        metadata[DIGEST] = hashlib.sha256(text.encode()).hexdigest()
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, (dtype, shape, values) in tensors.items():
        offsets = [position, position + len(values)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        position += len(values)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + b"".join(p[2] for p in tensors.values())


def digest(dtype: str, shape: list[int], values: bytes) -> str:
    """Return the digest of a tensor as the document holds it."""
    found = hashlib.sha256(f"{NUMPY.get(dtype, dtype)} {tuple(shape)} ".encode())
    found.update(values)
    return found.hexdigest()
