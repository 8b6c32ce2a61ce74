from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.prompts.extract import extract_answer

PROSE = st.text(st.characters(exclude_characters="\\{}"), max_size=40)


def test_the_last_closed_box_is_the_answer() -> None:
    assert extract_answer(r"\boxed{3} ... no, wait: \boxed{7}.") == "7"
    assert extract_answer(r"so \fbox{ 12 } it is") == "12"
    assert extract_answer(r"\boxed {12}") == "12"


def test_braces_inside_the_box_belong_to_the_answer() -> None:
    assert extract_answer(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert extract_answer(r"\boxed{\left\{1, 2\right\}} done {") == r"\left\{1, 2\right\}"
    assert extract_answer(r"\boxed{a \\ {b}}") == r"a \\ {b}"


def test_of_boxes_within_boxes_the_outermost_counts() -> None:
    assert extract_answer(r"\boxed{\fbox{1}, \fbox{2}}") == r"\fbox{1}, \fbox{2}"


def test_an_unclosed_box_is_no_answer() -> None:
    assert extract_answer(r"the answer is \boxed{\frac{1}{2}") is None
    assert extract_answer(r"\boxed{7") is None


def test_a_box_that_was_closed_survives_a_later_one_that_was_cut_off() -> None:
    assert extract_answer(r"\boxed{7}, that is \boxed{7.0") == "7"


def test_no_box_or_a_blank_box_is_no_answer() -> None:
    assert extract_answer("the answer is 7") is None
    assert extract_answer("") is None
    assert extract_answer(r"\boxed{ }") is None


def test_a_number_needs_no_braces_but_stands_alone() -> None:
    assert extract_answer(r"so $\boxed 7$.") == extract_answer(r"\boxed7") == extract_answer(r"\fbox 7, so") == "7"
    assert extract_answer(r"\boxed{3}, then \boxed -2.5.") == "-2.5"
    for text in (r"\boxed 7x", r"\boxed 1/2", r"\boxed 2^3", r"\boxed x", r"\boxed 1,234", r"\boxed"):
        assert extract_answer(text) is None, text


def test_what_stands_before_the_end_of_thinking_does_not_count() -> None:
    assert extract_answer(r"<think>\boxed{3}</think> \boxed{7}") == "7"
    assert extract_answer(r"<think>\boxed{3}</think> seven") is None
    assert extract_answer(r"a</think>\boxed{3}</think>b") is None
    assert extract_answer(r"<think>\boxed{3}") == "3"


def test_a_longer_answer_than_the_cap_is_returned_whole_to_be_refused_by_name() -> None:
    assert extract_answer(r"\boxed{" + "1" * 5000 + "}") == "1" * 5000


@given(PROSE, PROSE, PROSE)
def test_any_text_in_a_box_is_found_whatever_surrounds_it(before: str, inside: str, after: str) -> None:
    text = f"{before}\\boxed{{{inside}}}{after}".replace("</think>", "")
    assert extract_answer(text) == (inside.replace("</think>", "").strip() or None)


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "x", "\\fbox{"]), max_size=30))
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
