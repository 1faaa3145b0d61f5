"""BucketLadder against a linear scan, and the lists it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import ConfigError
from piecework.phases import BucketLadder, Phase

ladders = st.sets(st.integers(1, 5000), min_size=1, max_size=40).map(lambda sizes: BucketLadder(sorted(sizes)))
phases = st.sampled_from(list(Phase))


@given(ladders, st.integers(0, 6000))
def test_bucket_is_the_smallest_that_fits(ladder: BucketLadder, num_tokens: int) -> None:
    scan = next((bucket for bucket in ladder if bucket >= num_tokens), None)
    assert ladder.bucket_for(num_tokens) == scan
    assert (scan is None) == (num_tokens > ladder.max)


@given(ladders)
def test_a_bucket_holds_itself_and_nothing_larger(ladder: BucketLadder) -> None:
    assert len(ladder) == len(list(ladder))
    assert ladder.max == max(ladder)
    for bucket, following in zip(ladder.buckets, (*ladder.buckets[1:], None), strict=True):
        assert bucket in ladder
        assert ladder.bucket_for(bucket) == bucket
        assert ladder.bucket_for(bucket + 1) == following


@given(ladders, st.integers(1, 6000), st.none() | st.floats(0, 1))
def test_choose_keeps_to_the_padding_limit(ladder: BucketLadder, num_tokens: int, limit: float | None) -> None:
    bucket, reason = ladder.choose(num_tokens, limit)
    fits = ladder.bucket_for(num_tokens)
    if bucket is not None:
        assert bucket == fits
        assert reason is None
        assert limit is None or bucket - num_tokens <= limit * bucket + 1e-9
    elif fits is None:
        assert reason == "above the ladder"
    else:
        assert limit is not None
        assert ladder.padding_waste(num_tokens) > limit
        assert reason == f"padding waste above the limit {limit:g}"


def test_padding_waste_is_the_share_of_padded_rows() -> None:
    ladder = BucketLadder((4, 16))
    assert [ladder.padding_waste(n) for n in (1, 4, 5, 16, 17)] == [0.75, 0.0, 0.6875, 0.0, 0.0]
    assert ladder.choose(5, 0.6875) == (16, None)  # the limit itself is accepted
    assert ladder.choose(5, 0.6) == (None, "padding waste above the limit 0.6")


@given(phases, st.integers(1, 100_000))
def test_default_ladder_ends_in_exactly_the_maximum(phase: Phase, maximum: int) -> None:
    ladder = BucketLadder.default(phase, maximum)
    assert list(ladder) == sorted(set(ladder))
    assert ladder.max == maximum
    assert min(ladder) >= 1


@given(phases, st.integers(1, 100_000), st.data())
def test_default_ladder_wastes_little(phase: Phase, maximum: int, data: st.DataObject) -> None:
    first, share = {Phase.PREFILL: (16, 1 / 3), Phase.DECODE: (1, 1 / 5)}[phase]
    if maximum <= first:
        assert list(BucketLadder.default(phase, maximum)) == [maximum]
        return
    num_tokens = data.draw(st.integers(first, maximum))
    assert BucketLadder.default(phase, maximum).padding_waste(num_tokens) < share


def test_default_ladders() -> None:
    decode, prefill = BucketLadder.default("decode"), BucketLadder.default("prefill")
    assert decode.buckets[:9] == (1, 2, 3, 4, 5, 6, 7, 8, 10)
    assert decode.max == 256
    assert len(decode) == 28
    assert prefill.buckets[:5] == (16, 24, 32, 48, 64)
    assert prefill.max == 8192
    assert len(prefill) == 19
    assert BucketLadder.default("decode", 256) == decode
    assert BucketLadder.default("decode", 255).buckets == (*decode.buckets[:-1], 255)


@pytest.mark.parametrize(
    ("buckets", "text"),
    [
        ((), "buckets: expected at least one size, got an empty list; add one or leave buckets out"),
        ((0, 4), "buckets: expected positive integers, got 0; remove or correct it"),
        ((-8, 4), "buckets: expected positive integers, got -8; remove or correct it"),
        ((True, 4), "buckets: expected positive integers, got True; remove or correct it"),
        ((1, 4.0), "buckets: expected positive integers, got 4.0; remove or correct it"),
        ((1, None), "buckets: expected positive integers, got None; remove or correct it"),
        ((4, 8, 8), "buckets: expected each size once, got 8 more than once; keep one"),
        ((8, 4, 8), "buckets: expected each size once, got 8 more than once; keep one"),
        ((4, 80, 16), "buckets: expected ascending sizes, got 16 after 80; sort the list"),
        ("48", "buckets: expected a list of positive integers, got '48'; list the sizes"),
        (48, "buckets: expected a list of positive integers, got 48; list the sizes"),
        ({4, 8}, "buckets: expected a list of positive integers, got {4, 8}; list the sizes"),
    ],
)
def test_refused_lists(buckets: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BucketLadder(buckets)  # type: ignore[arg-type]
    assert str(caught.value) == text


@pytest.mark.parametrize("maximum", [0, -1, True, 2.0, "8"])
def test_default_ladder_refuses_a_maximum_that_is_no_size(maximum: object) -> None:
    with pytest.raises(ConfigError, match=r"^max_num_tokens: expected a positive integer, got "):
        BucketLadder.default("decode", maximum)  # type: ignore[arg-type]


def test_default_ladder_refuses_an_unknown_phase() -> None:
    with pytest.raises(
        ConfigError, match=r"^phase: expected one of prefill, decode, got 'prefil'; did you mean 'prefill'"
    ):
        BucketLadder.default("prefil")
