r"""The end of an answer: where a text may be cut so that its answer, as the verifier reads it, stays what it is."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefixrl.common.prompts.answer_end import AnswerWatch, is_answered, open_thought
from prefixrl.common.prompts.extract import boxes_in, extract_answer

COMPLETE = [
    pytest.param("so \\boxed{7}.\n\n", id="the paragraph of the box has ended"),
    pytest.param("\\[\n\\boxed{\\frac{1}{2}}\n\\]\n\n", id="of a displayed box"),
    pytest.param(
        "so \\boxed{7}. I hope it is correct.\n \t\nWait", id="a sentence more, and spaces"
    ),
    pytest.param("\\boxed{1} and \\boxed{2}\n\n", id="several boxes"),
    pytest.param("\\boxed{}\n\nso \\fbox{no}.\n\n", id="after an empty box"),
    pytest.param("put it into \\boxed{\\phantom{2}}:\n\n\\boxed{4}\n\n", id="after a drawn box"),
    pytest.param("so \\boxed 5.\n\n", id="a number without braces"),
    pytest.param("<think>\\boxed{3}\n\n</think>\n\n\\boxed{7}\n\n", id="behind a thought"),
    pytest.param("a { b \\boxed{7}\n\n", id="an open brace that is no box"),
]
OPEN = [
    pytest.param("so 7.\n\n", id="no box"),
    pytest.param("so \\boxed{7}", id="nothing behind the box"),
    pytest.param("so \\boxed{7}.\nThe option is ", id="the end of a line alone"),
    pytest.param("so \\boxed{7\n\n", id="an open box"),
    pytest.param("so \\boxed{x = \\boxed{7} + 1\n\n", id="a box in an open box"),
    pytest.param("so \\boxed{}.\n\n", id="an empty box"),
    pytest.param("12 = 7 + \\boxed{\\phantom{2}}.\n\n", id="a box to be filled in"),
    pytest.param("12 = 7 + \\boxed{\\text{ ? }}.\n\n", id="a question mark"),
    pytest.param("<think>it is \\boxed{7}.\n\n", id="a thought"),
    pytest.param("<think>\\boxed{3}</think>\n\n", id="a thought alone has a box"),
    pytest.param("so \\boxed{7}\n\n<think> no", id="a second thought"),
]


@pytest.mark.parametrize("text", COMPLETE)
def test_an_answer_is_complete_with_the_paragraph_of_its_box(text: str) -> None:
    assert is_answered(text)


@pytest.mark.parametrize("text", OPEN)
def test_an_answer_is_not_complete_before(text: str) -> None:
    assert not is_answered(text)


def test_a_box_of_the_given_beginning_is_no_answer_but_one_that_is_closed_behind_it_is() -> None:
    given_part = "so \\boxed{7}.\n\nOr \\boxed{"
    assert is_answered("so \\boxed{7}.\n\n") and not is_answered(given_part, len(given_part))
    watch = AnswerWatch("so \\boxed{7}.")
    assert not watch.add_piece("\n\nLet us see.\n\n") and watch.add_piece("\\boxed{8}\n\n")
    assert AnswerWatch(given_part).add_piece("9}\n\n")


@pytest.mark.parametrize(
    ("prompt", "mark"),
    [
        ("<|assistant|><think>\n", "<think>"),
        ("<|assistant|><think>\n\n</think>\n\n", ""),
        ("Think in <think> </think>.<|assistant|>", ""),
        ("<|assistant|>", ""),
    ],
)
def test_a_prompt_may_leave_a_thought_open(prompt: str, mark: str) -> None:
    assert open_thought(prompt) == mark
    watch = AnswerWatch(mark)
    assert watch.add_piece("\\boxed{3}\n\n") == (mark == "")
    assert watch.add_piece("</think>\\boxed{3}\n\n")


PIECES = [
    "\\boxed{",
    "\\fbox {",
    "\\",
    "boxed",
    "{",
    "}",
    "\\{",
    "\\}",
    "\\\\",
    "7",
    "x",
    " ",
    "\n",
    "\n\n",
    "<think>",
    "</think>",
    "\\boxed{7}",
    "\\boxed{}",
    "\\boxed{\\phantom{2}}",
    ".\n\n",
    "$",
    "and",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14)


def slow_is_answered(text: str) -> bool:
    """As the text of `answer_end.py` says it, character by character."""
    start = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    if "<think>" in text[start:]:
        return False
    opened: list[int] = []  # where the content of a box begins, -1 for another brace
    last: tuple[str, int] | None = None
    place = start
    while place < len(text):
        box = re.compile(r"\\(boxed|fbox)\s*\{").match(text, place)
        if text[place : place + 2] in ("\\\\", "\\{", "\\}"):
            place += 2
        elif box:
            opened.append(box.end())
            place = box.end()
        elif text[place] == "{":
            opened.append(-1)
            place += 1
        elif text[place] == "}":
            content = opened.pop() if opened else -1
            if content >= 0:
                last = text[content:place].strip(), place + 1
            place += 1
        else:
            place += 1
    if last is None or any(content >= 0 for content in opened):
        return False
    content, end = last
    is_drawn = not any(
        char.isalnum() for char in content.replace("\\phantom{2}", "").replace("\\", "")
    )
    lines = text[end:].split("\n")
    return not is_drawn and any(not line.strip() for line in lines[1:-1])


@given(TEXTS)
@example(["\\boxed{", "\\boxed{", "7", "}", "\n\n", "}", "\n\n"])
@example(["\\boxed{7}", "\n", " ", "\n"])
def test_it_is_the_slow_definition(pieces: list[str]) -> None:
    text = "".join(pieces)
    if re.search(r"\\(boxed|fbox)\s*\d", text):
        return  # a number without braces: not in the slow definition
    for end in range(len(text) + 1):
        assert is_answered(text[:end]) == slow_is_answered(text[:end]), text[:end]


@given(TEXTS, st.lists(st.integers(1, 9), min_size=1))
def test_a_watch_ends_a_text_at_the_first_piece_with_which_it_is_answered(
    pieces: list[str], sizes: list[int]
) -> None:
    """Pieces are cut anywhere: in the middle of a command, of a brace, of a line's end."""
    text, watch, place = "".join(pieces), AnswerWatch(), 0
    while place < len(text):
        size = sizes[place % len(sizes)]
        before, place = place, min(len(text), place + size)
        # It may be answered in the middle of a piece and be open again at its end.
        if watch.add_piece(text[before:place]):
            assert is_answered(text[:place])
            return
        assert not is_answered(text[:place])


@given(TEXTS, TEXTS)
def test_a_text_that_is_cut_there_keeps_its_answer_unless_another_box_or_the_end_of_a_thought_follows(
    pieces: list[str], more: list[str]
) -> None:
    text = "".join([*pieces, "\\boxed{7}", *more])
    ends = [end for end in range(len(text) + 1) if is_answered(text[:end])]
    if not ends:
        return
    cut, rest = text[: ends[0]], text[ends[0] :]
    has_box = len(boxes_in(cut)) < len(boxes_in(text))
    if not has_box and "</think>" not in rest:
        assert extract_answer(cut) == extract_answer(text) is not None


def test_a_long_text_of_placeholders_and_empty_lines_has_no_answer() -> None:
    watch = AnswerWatch("\\boxed{}")
    for _ in range(500):
        assert not watch.add_piece("\n\n") and not watch.add_piece("\\boxed{}")
