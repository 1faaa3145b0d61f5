"""A call's signature as plain JSON data: part of a portable program, and of a request for one."""

from __future__ import annotations

import torch

from .encode import Data, decode_constant, encode_constant
from .inputs import Signature


def encode_signature(signature: Signature) -> Data:
    """A signature as JSON data. Raises: PortableError."""
    return {
        "tensors": [[n, encode_constant(dt), str(device), list(sizes)] for n, dt, device, sizes in signature.tensors],
        "constants": [[name, encode_constant(value)] for name, value in signature.constants],
        "strides": [[name, list(strides)] for name, strides in signature.strides],
        "ambient": list(signature.ambient),
    }


def decode_signature(data: Data) -> Signature:
    """The signature that `encode_signature` wrote down. Raises: PortableError."""
    return Signature(
        tuple((n, decode_constant(dtype), torch.device(d), tuple(sizes)) for n, dtype, d, sizes in data["tensors"]),
        tuple((name, decode_constant(value)) for name, value in data["constants"]),
        tuple((name, tuple(strides)) for name, strides in data["strides"]),
        tuple(data["ambient"]),
    )
