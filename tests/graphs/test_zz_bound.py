import pytest, torch, copy
import piecework as pw
from .staging_models import *
from .staging_models import MODELS, model_of, padded, BUCKETS, SIZES, CONSTANT
from .toys import TOKENS_FIRST, CALLS
from .test_fuzz import assert_exactly

@pytest.mark.parametrize("specialize", [(), "all"])
@pytest.mark.parametrize("name", MODELS)
def test_bound(name, specialize):
    if name in ("constant_is_written", "args_share_what_is_written") and False: return
    function = MODELS[name]
    phase = {"backend": "tc_piecewise", "compiler": "aot_eager", "buckets": BUCKETS, "specialize": specialize}
    config = pw.GraphConfig(prefill=phase, decode=phase, capture_device="tape")
    first = pw.Runtime(model_of(function), config, dynamic_dims=TOKENS_FIRST, output_dims=None)
    first.run("decode", {"x": padded(4, 0)})
    try:
        programs = first.export()
    except pw.PieceworkError as e:
        pytest.skip(str(e)[:100])
    model, ref = model_of(function), model_of(function)
    rt = pw.Runtime(model, config, dynamic_dims=TOKENS_FIRST, output_dims=None, programs=programs)
    for seed, n in enumerate(SIZES):
        x = padded(n, seed); own = x[:n].clone()
        CALLS.clear(); got = rt.run("decode", {"x": own}); c = dict(CALLS)
        CALLS.clear()
        with torch.inference_mode(): exp = ref(x)
        assert_exactly(got, exp); assert_exactly(own, x[:n]); assert c == dict(CALLS)
        assert_exactly(list(model.buffers()), list(ref.buffers()))
    assert not rt.counters["fallbacks"], rt.counters["fallbacks"]
    assert rt.counters["captures"] == 2 and rt.counters["traces"] == 0
