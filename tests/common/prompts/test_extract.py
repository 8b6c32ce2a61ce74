from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.prompts.extract import extract_answer
from support.tables import table

PROSE = st.text(st.characters(exclude_characters="\\{}"), max_size=40)


@table(__file__)
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
