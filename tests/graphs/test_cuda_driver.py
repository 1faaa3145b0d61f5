"""What the driver says of a capture, which stream and workspaces it gets, and where in a model an error came from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.graphs import cuda
from piecework.graphs.cuda_driver import CaptureState, CudaDriver
from piecework.graphs.cuda_pool import CaptureStream
from piecework.graphs.model_line import model_line

NONE, ACTIVE, INVALIDATED = CaptureState
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default)


class Library:
    """libcuda, as far as the driver asks it: a capture with `num_nodes` nodes."""

    def __init__(self, state: int, num_nodes: int, info: str, num_results: int, status: int = 0) -> None:
        self._state, self._num_nodes, self._num_results, self._status = state, num_nodes, num_results, status
        setattr(self, info, self._capture_info)

    def _capture_info(self, stream: Any, state: Any, *results: Any) -> int:
        assert len(results) == self._num_results
        state._obj.value = self._state
        return self._status

    def cuGraphGetNodes(self, graph: Any, nodes: Any, num_nodes: Any) -> int:
        num_nodes._obj.value = self._num_nodes
        return 0


@pytest.mark.parametrize(("info", "num_results"), [("cuStreamGetCaptureInfo_v2", 4), ("cuStreamGetCaptureInfo_v3", 5)])
def test_the_driver_tells_the_state_of_a_capture(info: str, num_results: int) -> None:
    def capture(state: int, num_nodes: int, status: int = 0) -> tuple[CaptureState, int]:
        return CudaDriver(Library(state, num_nodes, info, num_results, status)).capture(7)

    assert capture(0, 5) == (NONE, 0)
    assert capture(1, 5) == (ACTIVE, 5)
    assert capture(1, 0) == (ACTIVE, 0)
    assert capture(2, 5) == (INVALIDATED, 0)
    assert capture(1, 5, status=999) == (INVALIDATED, 0), "what the driver cannot tell is no good capture"


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(
            -1
        ) + x.reshape(-7)  # fmt: skip


def test_the_line_of_an_error_is_the_models() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Sequential(Model())(torch.ones(3))
    line, called = model_line(caught.value.__traceback__)
    assert line is not None
    assert line.startswith(__file__)
    assert called in ("reshape", None)  # None before Python 3.11
    error = cuda._capture_error(caught.value, None)
    assert (error.op, error.line) == (called, line)
    assert line in str(error)
    assert cuda._capture_error(caught.value, "aten::reshape").op == "aten::reshape"
    assert model_line(None) == (None, None)


def test_workspaces_are_made_in_a_pool_of_their_own_before_each_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the stream is warm: somebody may have made torch give them up. See Note [cuBLAS workspaces]."""
    pool, is_inside, products = object(), [False], []

    @contextlib.contextmanager
    def use_mem_pool(used: object, device: torch.device) -> Iterator[None]:
        assert used is pool
        is_inside[0] = True
        yield
        is_inside[0] = False

    class Stream:
        def wait_stream(self, other: object) -> None:
            """There is nothing to wait for."""

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in PRODUCTS:
                products.append((args[0].dtype, is_inside[0]))
            return func(*args, **(kwargs or {}))

    for name, value in {
        "Stream": lambda device: Stream(),
        "MemPool": lambda: pool,
        "use_mem_pool": use_mem_pool,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    stream = CaptureStream(torch.device("cpu"))
    for dtypes in ((torch.float32, torch.bfloat16, torch.float16), (torch.float32,), (torch.float32,)):
        products.clear()
        with Products():
            stream.warm_up()
        assert products == [(dtype, True) for dtype in dtypes for _ in range(2)], "one of cuBLAS and one of cuBLASLt"
