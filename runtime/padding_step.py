"""Steps before there is traffic: inputs that are known by their signature only, or nothing but padding."""

from __future__ import annotations

import dataclasses

import torch

from ..graphs.inputs import TOKENS, BoundInputs, InputContract, Signature, ambient_state


def step_of_padding(bound: BoundInputs, examples: BoundInputs | None, contract: InputContract) -> BoundInputs:
    """Inputs of no tokens at all, which a bucket turns into nothing but padding.

    Inputs without dynamic dims are those of the examples, if they are for this signature, else zeros.
    """
    known = examples.tensors if examples is not None and examples.signature == bound.signature else {}
    others = examples.sizes if known and examples is not None else bound.sizes
    sizes = {**others, TOKENS: 0}
    strides = dict(bound.signature.strides)
    tensors = {}
    for name, dtype, device, shape in bound.signature.tensors:
        concrete = [sizes[size] if isinstance(size, str) else size for size in shape]
        if name in known and not contract.dynamic_dims.get(name):
            tensors[name] = known[name]
        elif name in strides:
            tensors[name] = torch.empty_strided(concrete, strides[name], dtype=dtype, device=device).zero_()
        else:
            tensors[name] = torch.zeros(concrete, dtype=dtype, device=device)
    return BoundInputs(tensors, bound.signature, sizes)


def under_ambient_state(signature: Signature) -> Signature:
    """The signature that the same inputs would have under torch's settings of now."""
    return dataclasses.replace(signature, ambient=ambient_state(device for _, _, device, _ in signature.tensors))


def free_sizes(signature: Signature) -> dict[str, int]:
    """A size for each dynamic dim of a signature, to trace with."""
    return {size: 2 for *_, sizes in signature.tensors for size in sizes if isinstance(size, str)}
