"""A restart on the same cache directory tries nothing out again; and what the checks of generated code see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .whole_checks import allocations, has_number, start_twice

CODE = """
    assert_size_stride(arg3_1, (1021, 16, 2, 16), (512, 32, 16, 1))
    buf0 = empty_strided_cuda((4, 64), (64, 1), torch.bfloat16)
    buf1 = empty_strided_cpu((7, ), (1, ), torch.float32)
    buf2 = empty_strided_cuda((), (), torch.float32)
    stream0 = get_raw_stream(0)
    triton_poi_fused_0.run(arg3_1, buf0, 522752, stream=stream0)
"""


def test_what_generated_code_allocates_and_works_through() -> None:
    assert list(allocations(CODE)) == [256, 7, 1]
    assert has_number(CODE, 1021 * 16 * 2 * 16)
    assert has_number("for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(522752L);", 522752)
    for other in (52275, 22752, 1022):
        assert not has_number(CODE, other)
    assert not has_number("buf522752 = 1522752 + 5227520", 522752)


@pytest.mark.slow
def test_a_restart_reuses_what_was_tried_out(tmp_path: Path) -> None:
    before = dict(os.environ)
    first, again = start_twice("cpu", tmp_path / "cache")
    assert os.environ == before
    for said in (first, again):
        assert said["compiles_whole"] == 1
        assert said["difference"] < 1e-5
        assert said["inductor"] == str(tmp_path / "cache" / "inductor")
    assert first["num_benchmarks"] >= 2  # the product: ATen's, and at least one that is generated
    assert again["num_benchmarks"] == 0, again["benchmarks"]
    assert again["compile_s"] < first["compile_s"]
