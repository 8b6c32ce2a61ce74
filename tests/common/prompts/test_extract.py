import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.prompts.extract import extract_answer

PROSE = st.text(st.characters(exclude_characters="\\{}"), max_size=40)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        pytest.param(r"\boxed{3} ... no, wait: \boxed{7}.", "7", id="the last of two boxes"),
        pytest.param(r"so \fbox{ 12 } it is", "12", id="fbox"),
        pytest.param(r"\boxed {12}", "12", id="a space before the brace"),
        pytest.param(r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", id="braces belong to the answer"),
        pytest.param(
            r"\boxed{\left\{1, 2\right\}} done {", r"\left\{1, 2\right\}", id="escaped braces"
        ),
        pytest.param(r"\boxed{a \\ {b}}", r"a \\ {b}", id="braces behind an escaped backslash"),
        pytest.param(
            r"\boxed{\fbox{1}, \fbox{2}}", r"\fbox{1}, \fbox{2}", id="the outermost of nested boxes"
        ),
        pytest.param(r"the answer is \boxed{\frac{1}{2}", "", id="a brace that is not closed"),
        pytest.param(r"\boxed{7", "", id="a box that is not closed"),
        pytest.param(r"\boxed{7}, that is \boxed{7.0", "7", id="an earlier box that is closed"),
        pytest.param("the answer is 7", "", id="no box"),
        pytest.param("", "", id="no text"),
        pytest.param(r"\boxed{ }", "", id="an empty box"),
        pytest.param(r"so $\boxed 7$.", "7", id="a number without braces"),
        pytest.param(r"\boxed7", "7", id="a number without space"),
        pytest.param(r"\fbox 7, so", "7", id="a number behind fbox"),
        pytest.param(r"\boxed{3}, then \boxed -2.5.", "-2.5", id="a negative number behind a box"),
        pytest.param(r"\boxed 7x", "", id="a number with a letter"),
        pytest.param(r"\boxed 1/2", "", id="a fraction without braces"),
        pytest.param(r"\boxed 2^3", "", id="a power without braces"),
        pytest.param(r"\boxed x", "", id="a letter without braces"),
        pytest.param(r"\boxed 1,234", "", id="thousands without braces"),
        pytest.param(r"\boxed", "", id="a box at the end"),
        pytest.param(r"<think>\boxed{3}</think> \boxed{7}", "7", id="a box behind the thinking"),
        pytest.param(r"<think>\boxed{3}</think> seven", "", id="a box in the thinking alone"),
        pytest.param(r"a</think>\boxed{3}</think>b", "", id="two ends of thinking"),
        pytest.param(r"<think>\boxed{3}", "3", id="thinking without an end"),
    ],
)
def test_the_answer_is_the_last_closed_box_or_a_number_behind_one_after_all_thinking(
    text: str, answer: str
) -> None:
    assert extract_answer(text) == (answer or None)


def test_a_longer_answer_than_the_cap_is_returned_whole_to_be_refused_by_name() -> None:
    assert extract_answer(r"\boxed{" + "1" * 5000 + "}") == "1" * 5000


@given(PROSE, PROSE, PROSE)
def test_any_text_in_a_box_is_found_whatever_surrounds_it(
    before: str, inside: str, after: str
) -> None:
    text = f"{before}\\boxed{{{inside}}}{after}".replace("</think>", "")
    assert extract_answer(text) == (inside.replace("</think>", "").strip() or None)


@given(
    st.lists(
        st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "x", "\\fbox{"]), max_size=30
    )
)
def test_the_answer_always_has_balanced_braces(pieces: list[str]) -> None:
    answer = extract_answer("".join(pieces))
    if answer is not None:
        bare = answer.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
        depth = 0
        for char in bare:
            depth += (char == "{") - (char == "}")
            assert depth >= 0
        assert depth == 0


def test_a_text_of_nothing_but_open_boxes_costs_one_pass() -> None:
    assert extract_answer("\\boxed{" * 50_000 + "3" + "}" * 50_000) is not None
