"""Stop strings: where a text ends, and what is held back on the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.engine.stop import StopStrings


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    stop = StopStrings(["END"])
    assert [stop.add(piece) for piece in ("one E", "E", "N", "x", " E", "ND two")] == ["one ", "E", "", "ENx", " ", ""]
    assert stop.matched == "END"
    assert stop.add("more") == ""
    assert stop.flush() == ""


def test_without_a_match_the_rest_comes_at_the_end() -> None:
    stop = StopStrings(["\n\n", "END"])
    assert [stop.add(piece) for piece in ("a\n", "b\n", "EN")] == ["a", "\nb", "\n"]
    assert (stop.flush(), stop.matched) == ("EN", None)
    assert stop.flush() == ""


def test_the_first_place_wins_and_then_the_order() -> None:
    stop = StopStrings(["b", "ab", "abc"])
    assert (stop.add("xabc"), stop.matched) == ("x", "ab")


def test_no_stop_strings() -> None:
    stop = StopStrings([])
    assert (stop.add("abc"), stop.flush(), stop.matched) == ("abc", "", None)


@given(
    pieces=st.lists(st.text("ab", max_size=3), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_pieces_end_where_the_whole_text_would(pieces: list[str], stops: list[str]) -> None:
    stop = StopStrings(stops)
    shown = ""
    for count, piece in enumerate(pieces, 1):
        shown += stop.add(piece)
        whole = "".join(pieces[:count])
        places = [whole.find(each) for each in stops if each in whole]
        assert (stop.matched is not None) == bool(places)
        if places:
            assert shown == whole[: min(places)]
            assert whole.startswith(stop.matched or "", min(places))
            return
        # What is shown can not be part of a stop string any more, and nothing else is held back.
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        assert not held or any(each.startswith(held) for each in stops)
        assert not any(each.startswith(whole[place:]) for each in stops for place in range(len(shown)))
    assert shown + stop.flush() == "".join(pieces)
