"""The tape: nothing happens while it records, and a replay equals the same calls made eagerly, bit for bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from piecework.errors import CaptureError
from piecework.graphs.device import Segment
from piecework.graphs.layouts import CallLayout, TensorLayout
from piecework.graphs.tape import TapeDevice
from piecework.graphs.tape_pool import TapePool

DEVICE = TapeDevice()
AMBIENTS = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}


def record(function: Callable[..., Any], *args: Any, pool: TapePool | None = None) -> tuple[Any, Segment]:
    with DEVICE.session(pool or DEVICE.open_pool()) as session:
        session.begin()
        outputs = function(*args)
        return outputs, session.end()


@pytest.fixture(params=AMBIENTS)
def ambient(request: pytest.FixtureRequest) -> Iterator[str]:
    with AMBIENTS[request.param]():
        yield request.param


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("tape_test", "FRAGMENT")
    yield library
    library._destroy()


class Block(torch.nn.Module):
    """A decoder layer with everything that one usually has."""

    def __init__(self, hidden: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.Parameter(torch.rand(hidden))
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden)
        self.gate_up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens, hidden = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (hidden,), self.norm, 1e-6)).chunk(3, dim=-1)
        q, k, v = (t.reshape(tokens, self.heads, -1).transpose(0, 1)[None] for t in (q, k, v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed[0].transpose(0, 1).reshape(tokens, hidden))
        gate, up = self.gate_up(F.layer_norm(x, (hidden,))).split(2 * hidden, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(torch.nn.Module):
    """Ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * torch.pow(100.0, -torch.arange(0, 4) / 4.0)
        x = self.embed(ids)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(x, self.embed.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_replays_as_it_runs(ambient: str, dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    ids, positions = torch.randint(0, 32, (7,)), torch.arange(7)
    logits, segment = record(model, ids, positions)
    assert logits.isnan().all()
    for seed in range(3):
        ids.copy_(torch.randint(0, 32, (7,), generator=torch.Generator().manual_seed(seed)))
        segment.replay()
        assert torch.equal(logits, model(ids, positions))


def _rotary(x: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.reshape(6, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(turned).flatten(1).conj()


def _in_place(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.clone()
    y[1:3].mul_(2).add_(1)
    y[:, 0] = 5
    y += x
    return y, y.masked_fill_(x > 0, -1.0), y.zero_()


def _out(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, grown = torch.empty(6, 8), torch.empty(0)
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.add(x, 1, out=first)
    torch.mul(first, x, out=grown)
    torch.topk(x, 3, out=(values, indices))
    return first, grown, values, indices, grown.t() + 1


def _changes_of_metadata(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    total = y.sum(1)
    y.t_()
    return y, total, y.sum(1), y.unsqueeze_(0) + 1


def _foreach(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sums = torch._foreach_add([x, x[:2]], 1.0)
    torch._foreach_mul_(sums, 3.0)
    return *sums, *torch._foreach_exp(sums)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda x: F.linear(x, torch.ones(3, 8), torch.ones(3)),
    "matmuls": lambda x: (x @ x.t(), torch.bmm(x[None], x.t()[None]), torch.einsum("ij,kj->ki", x, x), x @ x[0]),
    "softmax": lambda x: (x.softmax(-1), x.log_softmax(0), x.logsumexp(0), F.gelu(x), F.gelu(x, approximate="tanh")),
    "norms": lambda x: (F.rms_norm(x, (8,)), F.layer_norm(x, (8,)), F.group_norm(x[None], 2), x.var(0), x.mean()),
    "sdpa": lambda x: F.scaled_dot_product_attention(*[x.view(1, 2, 6, 4)] * 3, attn_mask=torch.ones(6, 6).tril() > 0),
    "indexing": lambda x: (x[x.argmax(0)], x.index_select(1, x.argmin(1)), x.gather(1, x.argsort(1)), x[..., ::2]),
    "scatter": lambda x: (
        torch.zeros(6, 8).scatter_(1, x.argsort(1), x),
        x.clone().index_add_(0, x.argmax(0), x[:1].repeat(8, 1)),
    ),
    "index_put": lambda x: x.clone().index_put_((x.argmax(0),), x[:1].repeat(8, 1).sort().values, accumulate=True),
    "where": lambda x: (
        torch.where(x > 0, x, -x),
        x.clamp(min=0),
        torch.where(x > 0, 1.0, 0.0),
        x.masked_fill(x > 0, 2),
    ),
    "sorts": lambda x: (*x.topk(3), *x.sort(), x.cumsum(0), *x.max(0), *x.kthvalue(2)),
    "casts": lambda x: (x.to(torch.bfloat16), x.half().float(), x.long() / 3, x.int().float().mean(), x.type_as(x)),
    "convs": lambda x: (
        F.conv1d(x[None], torch.ones(6, 6, 3), padding=1),
        F.conv1d(x[None], torch.ones(6, 1, 2), groups=6),
    ),
    "views": lambda x: (*x.chunk(2), *x.unbind(1), *x.split([2, 4]), x.t(), x.expand(2, 6, 8), x.view(torch.int32)),
    "reshapes": lambda x: (
        x.t().reshape(-1),
        x.t().contiguous(),
        x.flatten(),
        x.reshape(3, 16),
        x.roll(1),
        x.repeat(2, 1),
    ),
    "factories": lambda x: (
        torch.arange(5) * x[0, 0],
        torch.ones_like(x),
        torch.full((2,), 3.0),
        x.new_zeros(2),
        torch.eye(3),
    ),
    "one_hot": lambda x: (
        F.one_hot(x.argmax(0), 6),
        torch.repeat_interleave(x, 2, 0),
        torch.tril(x),
        torch.outer(x[0], x[0]),
    ),
    "repeats": lambda x: torch.repeat_interleave(x, torch.arange(6), dim=0, output_size=15),
    "complex": _rotary,
    "in place": _in_place,
    "out": _out,
    "metadata": _changes_of_metadata,
    "foreach": _foreach,
    "constants": lambda x: x + torch.tensor([1.0] * 8) * torch.tensor(2.0),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "profiled": lambda x: _profiled(x),
}


def _profiled(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("here"):
        return x + 1


def _flat(outputs: Any) -> Sequence[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_equals_the_same_calls_made_eagerly(name: str, ambient: str) -> None:
    x = torch.randn(6, 8)
    before = x.clone()
    outputs, segment = record(PROGRAMS[name], x)
    assert torch.equal(x, before)
    for _ in range(2):
        x.copy_(torch.randn(6, 8))
        segment.replay()
        for got, expected in zip(_flat(outputs), _flat(PROGRAMS[name](x)), strict=True):
            assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert torch.equal(got, expected)


def test_outputs_are_poison_until_the_first_replay(ambient: str) -> None:
    x = torch.randn(4)
    types = (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2)
    outputs, segment = record(lambda: [x.to(dtype) for dtype in types])
    assert all(output.to(torch.complex64).isnan().all() for output in outputs)
    (small, byte, mask), others = record(lambda: (x.int(), x.abs().to(torch.uint8), x > 5))
    assert (small == torch.iinfo(torch.int32).min).all()
    assert (byte == 255).all()
    assert mask.all()
    segment.replay(), others.replay()
    assert torch.equal(outputs[2], x.double())
    assert not mask.any()


def test_what_is_only_allocated_is_poison_and_stays_so(ambient: str) -> None:
    empty, segment = record(lambda: torch.empty(3))
    segment.replay()
    assert empty.isnan().all()


def test_nothing_is_executed_while_recording(library: torch.library.Library, ambient: str) -> None:
    ran: list[str] = []
    library.define("bump(Tensor(a!) x) -> ()")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("bump", lambda x: (ran.append("bump"), x.add_(1), None)[-1], "CompositeExplicitAutograd")
    library.impl("twice", lambda x: (ran.append("twice"), x * 2)[-1], "CompositeExplicitAutograd")
    torch.library.register_fake("tape_test::twice", torch.empty_like, lib=library)
    x, cache = torch.ones(3), torch.zeros(3)
    seeds = torch.get_rng_state()

    def model() -> torch.Tensor:
        torch.ops.tape_test.bump(cache)
        cache[1:].copy_(x[1:])
        torch.ops.tape_test.bump.default(cache[:1])
        return torch.ops.tape_test.twice(x) + F.dropout(torch.rand(3), 0.5) * 0

    out, segment = record(model)
    assert not ran
    assert torch.equal(cache, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), seeds)
    assert out.isnan().all()
    segment.replay()
    assert ran == ["bump", "bump", "twice"]
    assert torch.equal(cache, torch.tensor([2.0, 1.0, 1.0]))
    assert torch.equal(out, torch.full((3,), 2.0))


def test_random_operators_draw_anew_at_each_replay() -> None:
    (drawn, kept), segment = record(lambda: (torch.rand(64), F.dropout(torch.ones(64), 0.5)))
    segment.replay()
    first, second = drawn.clone(), kept.clone()
    segment.replay()
    assert not torch.equal(drawn, first)
    assert not torch.equal(kept, second)


def test_views_stay_views_and_addresses_stay(ambient: str) -> None:
    x = torch.zeros(4, 4)
    (view, made, made_view), segment = record(lambda: (x[1:].t(), y := x + 1, y[0]))
    assert view.data_ptr() == x[1:].data_ptr()
    assert made_view.data_ptr() == made.data_ptr()
    address = made.data_ptr()
    segment.replay()
    assert made.data_ptr() == address
    assert torch.equal(made_view, torch.ones(4))


def test_a_replay_runs_no_python_of_the_model() -> None:
    calls: list[int] = []
    x = torch.ones(2)
    _, segment = record(lambda: (calls.append(1), x.add_(1)))
    segment.replay()
    segment.replay()
    assert len(calls) == 1
    assert torch.equal(x, torch.full((2,), 3.0))


def test_memory_of_either_grad_mode_is_written_under_any() -> None:
    with torch.inference_mode():
        made_in_inference = torch.zeros(2)
    normal = torch.zeros(2)
    with torch.inference_mode():
        _, segment = record(lambda: (made_in_inference.add_(1), normal.add_(2)))
    with torch.enable_grad():
        segment.replay()
    assert torch.equal(made_in_inference, torch.ones(2))
    assert torch.equal(normal, torch.full((2,), 2.0))


def test_parameters_with_gradients_are_recorded_under_grad_mode() -> None:
    layer = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    out, segment = record(layer, x)
    assert out.requires_grad
    segment.replay()
    assert torch.equal(out, layer(x))


def test_a_replay_does_not_depend_on_the_modes_around_it() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    half, plain = torch.arange(4), torch.zeros(4)

    def model() -> tuple[torch.Tensor, ...]:
        return F.linear(x, w), half / 3, F.softmax(x @ w, -1), plain + torch.full((4,), 0.1)

    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        cast, under_autocast = record(model)
        cast_eagerly = model()
    with torch.inference_mode():
        outputs, segment = record(model)
        eagerly = model()
    torch.set_default_dtype(torch.float64)
    try:
        under_autocast.replay()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            segment.replay()
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert cast[0].dtype is torch.bfloat16
    assert all(map(torch.equal, outputs, eagerly))
    assert all(map(torch.equal, cast, cast_eagerly))


def test_segments_with_a_break_between_them() -> None:
    x = torch.ones(3)
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        a = x + 1
        first = session.end()
        during_the_break = x.tolist()  # what is done between segments is done as ever
        session.begin()
        b = a * 2
        second = session.end()
    assert during_the_break == [1.0, 1.0, 1.0]
    first.replay(), a.add_(1), second.replay()
    assert torch.equal(b, torch.full((3,), 6.0))


def test_a_segment_may_end_and_begin_inside_a_dispatch_mode_of_the_caller() -> None:
    segments: list[Segment] = []

    class Breaking(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.relu.default:
                segments.append(session.end())
                session.begin()
                return torch.empty_like(args[0])
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        with Breaking():
            a = F.linear(x, torch.eye(2)) - 3
            b = torch.relu(a)
            c = b + 1
        segments.append(session.end())
    assert torch.ones(2).tolist() == [1.0, 1.0]
    segments[0].replay(), b.copy_(a.relu()), segments[1].replay()
    assert torch.equal(c, torch.ones(2))


@pytest.mark.parametrize("during", ["segment", "break"])
def test_a_body_that_raises_leaves_nothing_behind(during: str) -> None:
    x, pool = torch.zeros(2), DEVICE.open_pool()
    with pytest.raises(ZeroDivisionError):
        with DEVICE.session(pool) as session:
            session.begin()
            x.add_(1)
            if during == "break":
                session.end()
            raise ZeroDivisionError
    gc.collect()
    assert (x + 1).tolist() == [1.0, 1.0]
    assert (pool.num_captures, pool.num_bytes) == (0, 0)
    out, segment = record(lambda: x + 2, pool=pool)
    segment.replay()
    assert torch.equal(out, torch.full((2,), 2.0))


def test_our_own_mistakes_are_asserted() -> None:
    with DEVICE.session(DEVICE.open_pool()) as session:
        with pytest.raises(AssertionError, match="no segment is open"):
            session.end()
        with pytest.raises(AssertionError, match="no segment is open"):
            session.call(torch.relu, [], CallLayout.observe([], []))
        session.begin()
        with pytest.raises(AssertionError, match="has not ended"):
            session.begin()
        with DEVICE.session(DEVICE.open_pool()) as other:
            with pytest.raises(AssertionError, match="another session"):
                other.begin()
        segment = session.end()
    segment.release()
    segment.release()
    with pytest.raises(AssertionError, match="released"):
        segment.replay()


def test_another_thread_computes_undisturbed() -> None:
    x, seen = torch.ones(3), []
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        y = x + 1
        thread = threading.Thread(target=lambda: seen.append((torch.ones(2) * 3).tolist()))
        thread.start()
        thread.join()
        segment = session.end()
    assert seen == [[3.0, 3.0]]
    assert y.isnan().all()
    segment.replay()
    assert torch.equal(y, torch.full((3,), 2.0))


def test_two_threads_capture_and_replay_at_once() -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 5, generator=generator)
        for _ in range(10):
            out, segment = record(lambda: F.softmax(x @ x, -1))
            segment.replay()
            if not torch.equal(out, F.softmax(x @ x, -1)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_segment_holds_what_it_reads() -> None:
    outside = torch.ones(4)
    out, segment = record(lambda: outside * torch.full((4,), 3.0) + 1)
    del outside
    noise = [torch.full((4,), float(i)) for i in range(64)]
    segment.replay()
    assert torch.equal(out, torch.full((4,), 4.0))
    assert len(noise) == 64


# Opaque calls


def test_a_compiled_callable_runs_at_replay_and_not_while_recording() -> None:
    compiles: list[int] = []
    runs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        compiles.append(1)

        def run(*args: Any) -> Any:
            runs.append(1)
            return graph(*args)

        return torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda g, _: _boxed(g, runs))(graph, _)

    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: [F.gelu(a @ b), a.sum(0)], backend=backend, fullgraph=True)
    with torch.inference_mode():
        a, b = torch.randn(4, 4), torch.randn(4, 4)
        layout = CallLayout.observe([a, b], compiled(a, b))
        assert (len(compiles), len(runs)) == (1, 1)
        with DEVICE.session(DEVICE.open_pool()) as session:
            session.begin()
            c = a * 2
            d, e = session.call(compiled, [c, b], layout)
            f = d + 1
            segment = session.end()
        assert len(runs) == 1
        assert d.isnan().all()
        assert e.isnan().all()
        for _ in range(2):
            a.copy_(torch.randn(4, 4))
            segment.replay()
            assert torch.equal(d, F.gelu((a * 2) @ b))
            assert torch.equal(e, (a * 2).sum(0))
            assert torch.equal(f, d + 1)
    assert (len(compiles), len(runs)) == (1, 3)


def _boxed(graph: torch.fx.GraphModule, runs: list[int]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        runs.append(1)
        return graph(*args)

    return run


def test_a_call_that_writes_and_returns_its_arguments() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        x.add_(1)
        return [x[1:], x + y, 7, (y > 0)]

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(3), torch.ones(3)

    sample = inputs()
    layout = CallLayout.observe(sample, function(*sample))
    x, y = inputs()
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        tail, total, number, mask = session.call(function, [x, y], layout)
        segment = session.end()
    assert (number, x.tolist()) == (7, [0.0, 0.0, 0.0])
    assert tail.data_ptr() == x[1:].data_ptr()
    assert total.isnan().all()
    segment.replay()
    segment.replay()
    assert torch.equal(x, torch.full((3,), 2.0))
    assert torch.equal(tail, torch.full((2,), 2.0))
    assert torch.equal(total, torch.full((3,), 3.0))
    assert mask.all()


def test_a_call_sees_the_modes_of_its_capture_and_no_mode_of_the_tape() -> None:
    seen: list[tuple[Any, ...]] = []

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        modes = len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        functions = len(torch.overrides._get_current_function_mode_stack())
        seen.append((modes, functions, torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        return [x.clone()]

    x = torch.ones(2)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        layout = CallLayout.observe([x], function(x))
        with DEVICE.session(DEVICE.open_pool()) as session:
            session.begin()
            session.call(function, [x], layout)
            segment = session.end()
    with torch.inference_mode():
        segment.replay()
    assert seen == [(0, 0, False, True), (0, 0, False, True)]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda x: [x[:1] + 1], r"expected torch.float32\[2\] as output 0 of .*got torch.float32\[1\]"),
        (lambda x: [x.double()], r"expected torch.float32\[2\] .*got torch.float64\[2\]"),
        (lambda x: [x + 1, x + 2], "expected 1 outputs of .*got 2"),
        (lambda x: [None], "got a NoneType"),
    ],
)
def test_a_call_that_returns_something_else_at_replay_is_an_error(returned: Callable[..., Any], expected: str) -> None:
    x = torch.ones(2)
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        session.call(returned, [x], CallLayout.observe([x], [x + 1]))
        segment = session.end()
    with pytest.raises(CaptureError, match=expected):
        segment.replay()


def test_an_operator_whose_fake_is_wrong_is_an_error_at_replay(library: torch.library.Library) -> None:
    library.define("half(Tensor x) -> Tensor")
    library.impl("half", lambda x: x[::2].clone(), "CompositeExplicitAutograd")
    torch.library.register_fake("tape_test::half", torch.empty_like, lib=library)
    x = torch.ones(4)
    _, segment = record(lambda: torch.ops.tape_test.half(x))
    with pytest.raises(CaptureError, match=r"float32\[4\] as output 0 of tape_test::half.*float32\[2\]") as caught:
        segment.replay()
    assert caught.value.op == "tape_test::half"


def test_layouts_of_calls_are_kept() -> None:
    x = torch.ones(2, 3)
    layout = CallLayout.observe([x], [torch.ones(3, 2).t()])
    with DEVICE.session(DEVICE.open_pool()) as session:
        session.begin()
        (out,) = session.call(lambda x: [x.t().contiguous().t()], [x], layout)
        segment = session.end()
    assert TensorLayout.of(out) == layout.outputs[0]
    segment.replay()
    assert torch.equal(out, x)


def test_the_rest_of_the_device_does_nothing() -> None:
    with DEVICE.exclusive():
        DEVICE.give_back()
    assert DEVICE.name == "tape"
