"""Stop strings, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.stop import StopMatcher


def run(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """What goes out after each piece, the rest at the end included, and what matched."""
    out = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        out.append(text)
        if stop is not None:
            return out, stop
    return [*out, matcher.flush()], None


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.data())
def test_the_outcome_does_not_depend_on_the_pieces(data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("abc", max_size=5), max_size=4))
    pieces = data.draw(st.lists(st.text("abc", max_size=6), max_size=8))
    include = data.draw(st.booleans())
    out, stop = run(StopMatcher(stops, include=include), pieces)
    assert ("".join(out), stop) == expected("".join(pieces), stops, include)


@given(st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3), st.text("abc", max_size=12))
def test_no_more_is_held_back_than_may_begin_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    told = ""
    for at, character in enumerate(text, 1):
        piece, stop = matcher.push(character)
        told += piece
        if stop is not None:
            return
        held = text[:at][len(told) :]
        longest = max((n for s in stops for n in range(len(s)) if text[:at].endswith(s[:n])), default=0)
        assert len(held) == longest


def test_a_stop_string_over_several_pieces_never_leaks() -> None:
    assert run(StopMatcher(["DEFGHIJ"]), list("ABCDEFGHIJKL")) == (["A", "B", "C", *[""] * 7], "DEFGHIJ")


def test_within_a_piece() -> None:
    assert run(StopMatcher(["b,c"]), ["a,b,cd"]) == (["a,"], "b,c")
    assert run(StopMatcher(["b,c"], include=True), ["a,b,cd"]) == (["a,b,c"], "b,c")


def test_other_markers_are_not_cut() -> None:
    assert run(StopMatcher(["zzzzzz"]), ["a</th", "ink>", " b"]) == (["a</th", "ink>", " b", ""], None)


def test_what_was_held_back_comes_when_it_is_no_stop_string() -> None:
    assert run(StopMatcher(["STOP"]), ["a ST", "EP S", "T"]) == (["a ", "STEP ", "", "ST"], None)


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_all_passes(stops: list[str]) -> None:
    assert run(StopMatcher(stops), ["a", "", "b"]) == (["a", "", "b", ""], None)
