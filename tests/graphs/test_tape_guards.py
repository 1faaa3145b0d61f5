"""What a tape refuses: each guard fires, and says which operator and which line of the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from piecework.errors import CaptureError

from .tape_recording import AMBIENTS, DEVICE, record

X = torch.arange(6.0)
MASK = X > 2
SPARSE = torch.eye(6).to_sparse()


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("tape_guards", "FRAGMENT")
    yield library
    library._destroy()


def refused(function: Callable[[], Any]) -> CaptureError:
    """The error of recording a function, from its body; afterwards everything is as before."""
    before = X.clone()
    with pytest.raises(CaptureError) as caught:
        record(function)
    assert (X + 1).tolist() == (before + 1).tolist()
    return caught.value


def _branch() -> None:
    if X.sum() > 3:
        raise AssertionError


OPERATORS: dict[str, tuple[Callable[[], Any], str, str]] = {
    # what the model writes: (call, operator, what the message says)
    "item": (lambda: torch.ops.aten.item(X[0]), "aten::(item|_local_scalar_dense)", "on the host"),
    "number": (lambda: X[X[0].long()], "aten::(item|_local_scalar_dense)", "on the host"),
    "equal": (lambda: torch.equal(X, X + 1), "aten::equal", "on the host"),
    "allclose": (lambda: torch.allclose(X, X), "aten::allclose", "on the host"),
    "in": (lambda: 3.0 in X, "aten::(item|_local_scalar_dense)", "on the host"),
    "nonzero": (lambda: X.nonzero(), "aten::nonzero", "depends on the data"),
    "where": (lambda: torch.where(MASK), "aten::nonzero", "depends on the data"),
    "argwhere": (lambda: torch.argwhere(MASK), "aten::(argwhere|nonzero)", "depends on the data"),
    "unique": (lambda: X.unique(), "aten::_unique2", "depends on the data"),
    "unique_consecutive": (lambda: X.unique_consecutive(), "aten::unique_consecutive", "depends on the data"),
    "masked_select": (lambda: X.masked_select(MASK), "aten::masked_select", "depends on the data"),
    "bincount": (lambda: torch.bincount(X.long()), "aten::bincount", "depends on the data"),
    "index by mask": (lambda: X[MASK], "aten::index.Tensor", "indexes with a mask"),
    "index by bytes": (lambda: X[MASK.to(torch.uint8).bool()], "aten::index.Tensor", "indexes with a mask"),
    "assign by mask": (lambda: X.__setitem__(MASK, 0), "aten::(_?index_put_.*)", "indexes with a mask"),
    "index_put": (lambda: X.index_put((MASK,), X[:1]), "aten::index_put", "indexes with a mask"),
    "repeat_interleave": (
        lambda: X.repeat_interleave(torch.arange(6)),
        r"aten::repeat_interleave.*",
        "pass output_size",
    ),
    "one_hot": (lambda: F.one_hot(X.long()), "aten::one_hot", "pass num_classes"),
    "tensor_split": (
        lambda: torch.tensor_split(X, torch.tensor([1, 3])),
        r"aten::tensor_split\.tensor_indices_or_sections|torch.tensor_split",
        "tuple of ints",
    ),
    "inverse": (lambda: torch.linalg.inv(torch.eye(3)), "aten::_linalg_check_errors", "_ex form"),
    "sparse": (lambda: torch.sparse.mm(SPARSE, X[:, None]), "aten::.*", "use dense tensors"),
}


@pytest.mark.parametrize("ambient", AMBIENTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_a_gpu_would_wait_for(name: str, ambient: str) -> None:
    function, op, says = OPERATORS[name]
    with AMBIENTS[ambient]():
        error = refused(function)
    assert error.op is not None
    assert re.fullmatch(op, error.op)
    assert says in str(error)
    assert error.line is not None
    assert error.line.startswith(f"{__file__}:")
    assert str(error).startswith(f"{error.line}: expected only work that a capture can record, got {error.op}: ")


METHODS: dict[str, tuple[Callable[[], Any], str]] = {
    "tolist": (lambda: X.tolist(), "Tensor.tolist"),
    "item": (lambda: X[0].item(), "Tensor.item"),
    "numpy": (lambda: X.numpy(), "Tensor.numpy"),
    "asarray": (lambda: np.asarray(X), "Tensor.__array__"),
    "cpu": (lambda: X.cpu(), "Tensor.cpu"),
    "to cpu": (lambda: X.to("cpu"), 'Tensor.to("cpu")'),
    "to cpu by name": (lambda: X.to(device="cpu:0"), 'Tensor.to("cpu")'),
    "bool": (lambda: bool(X[0]), "Tensor.__bool__"),
    "branch": (_branch, "Tensor.__bool__"),
    "int": (lambda: int(X[0]), "Tensor.__int__"),
    "float": (lambda: float(X[0]), "Tensor.__float__"),
    "complex": (lambda: complex(X[0]), "Tensor.__complex__"),
    "index": (lambda: range(10)[X[0].long() :], "Tensor.__index__"),
    "dlpack": (lambda: torch.from_dlpack(X), "Tensor.__dlpack__"),
    "print": (lambda: str(X), "Tensor.__repr__"),
    "tensor": (lambda: torch.tensor([1.0], device=X.device), "torch.tensor"),
    "as_tensor": (lambda: torch.as_tensor([1.0], device=X.device), "torch.as_tensor"),
    "new_tensor": (lambda: X.new_tensor([1.0]), "Tensor.new_tensor"),
}


@pytest.mark.parametrize("ambient", AMBIENTS)
@pytest.mark.parametrize("name", METHODS)
def test_calls_that_never_reach_a_dispatcher(name: str, ambient: str) -> None:
    function, op = METHODS[name]
    with AMBIENTS[ambient]():
        error = refused(function)
    assert error.op == op
    assert error.line is not None
    assert error.line.startswith(f"{__file__}:")
    assert "which a GPU would have to wait for" in str(error)


def test_the_whole_message() -> None:
    error = refused(lambda: X.tolist())
    line = test_the_whole_message.__code__.co_firstlineno + 1
    assert error.line == f"{__file__}:{line}"
    assert str(error) == (
        f"{__file__}:{line}: expected only work that a capture can record, got Tensor.tolist: it reads the data on the "
        f"host, which a GPU would have to wait for; use a tensor operation instead (torch.where, masked_fill_), or "
        f"move it out of the captured region"
    )


def test_the_line_is_that_of_the_model_not_of_torch() -> None:
    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.max().item()

    error = refused(lambda: torch.nn.Sequential(torch.nn.Identity(), Reads())(X))
    assert error.line == f"{__file__}:{Reads.forward.__code__.co_firstlineno + 1}"


ALLOWED: dict[str, Callable[[], Any]] = {
    "index": lambda: X[torch.arange(3)],
    "assign": lambda: X.clone().__setitem__(torch.arange(3), 1.0),
    "to the model's device": lambda: X.to(X.device),
    "to a dtype": lambda: X.to(torch.float16),
    "repeats of known sum": lambda: X.repeat_interleave(torch.arange(6), output_size=15),
    "repeats": lambda: X.repeat_interleave(2),
    "classes": lambda: F.one_hot(X.long(), 8),
    "nonzero of known size": lambda: torch.nonzero_static(MASK, size=3),
    "a constant of the host": lambda: X * torch.tensor(2.0),
    "sizes": lambda: (len(X), X.shape, X.numel(), X.is_contiguous(), X.data_ptr(), [*X]),
    "as_tensor of a tensor": lambda: torch.as_tensor(X, device=X.device),
    "inverse without a check": lambda: torch.linalg.inv_ex(torch.eye(3)),
    "async assert": lambda: torch._assert_async(MASK.any()),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_looks_alike_and_is_recorded(name: str) -> None:
    with torch.inference_mode():
        _, segment = record(ALLOWED[name])
    segment.replay()


def test_an_error_that_the_model_catches_voids_the_capture() -> None:
    pool = DEVICE.open_pool()
    with DEVICE.session(pool) as session:
        for read in (lambda: X.tolist(), lambda: X.nonzero()):
            session.begin()
            with pytest.raises(CaptureError):
                read()
            y = X + 1
            with pytest.raises(CaptureError, match="caught this error and went on.*expected only work") as caught:
                session.end()
            assert caught.value.op in ("Tensor.tolist", "aten::nonzero")
            assert caught.value.line is not None
            del y
        assert pool.num_captures == 0
        session.begin()
        segment = session.end()
    segment.replay()


def test_a_replay_while_a_segment_is_open() -> None:
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        y = X + 1
        first = session.end()
        first.replay()
        session.begin()
        with pytest.raises(CaptureError, match="replay: expected no open segment in this thread"):
            first.replay()
    assert torch.equal(y, X + 1)
    first.replay()


@pytest.mark.parametrize("kernel", ["CompositeExplicitAutograd", "CPU"])
def test_an_operator_without_a_fake(library: torch.library.Library, kernel: str) -> None:
    ran: list[int] = []
    library.define("nofake(Tensor x) -> Tensor")
    library.impl("nofake", lambda x: (ran.append(1), x.clone())[1], kernel)
    error = refused(lambda: torch.ops.tape_guards.nofake(X))
    assert error.op == "tape_guards::nofake"
    assert 'torch.library.register_fake("tape_guards::nofake")' in str(error)
    assert not ran


def test_a_custom_op_without_a_fake() -> None:
    @torch.library.custom_op("tape_guards_custom::nofake", mutates_args=())
    def nofake(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    error = refused(lambda: nofake(X))
    assert 'torch.library.register_fake("tape_guards_custom::nofake")' in str(error)


def test_an_operator_that_returns_a_number(library: torch.library.Library) -> None:
    library.define("count(Tensor x) -> int")
    library.impl("count", lambda x: 3, "CompositeExplicitAutograd")
    assert "register_fake" in str(refused(lambda: torch.ops.tape_guards.count(X)))


def test_an_operator_whose_shape_depends_on_data(library: torch.library.Library) -> None:
    def fake(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    library.define("some(Tensor x) -> Tensor")
    library.impl("some", lambda x: x[x > 0], "CompositeExplicitAutograd")
    torch.library.register_fake("tape_guards::some", fake, lib=library)
    assert "let them depend on sizes only" in str(refused(lambda: torch.ops.tape_guards.some(X)))


def test_an_operator_that_returns_a_view(library: torch.library.Library) -> None:
    library.define("view(Tensor(a) x) -> Tensor(a)")
    library.impl("view", lambda x: x[1:], "CPU")
    torch.library.register_fake("tape_guards::view", lambda x: x[1:], lib=library)
    assert "returns a view of an argument" in str(refused(lambda: torch.ops.tape_guards.view(X)))


def test_an_operator_tagged_unsafe(library: torch.library.Library) -> None:
    library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    library.impl("unsafe", lambda x: x.clone(), "CPU")
    torch.library.register_fake("tape_guards::unsafe", torch.empty_like, lib=library)
    assert "tagged cudagraph_unsafe" in str(refused(lambda: torch.ops.tape_guards.unsafe(X)))


def test_higher_order_operators() -> None:
    from torch._higher_order_ops.cond import cond_op

    error = refused(lambda: cond_op(MASK.any(), lambda x: x + 1, lambda x: x - 1, (X,)))
    assert "higher-order" in str(error)
