"""Problems as users have them: one JSON object per line, checked row by row."""

from pathlib import Path

import msgspec

from prefixrl.common.config import DataConfig
from prefixrl.common.errors import DataError
from prefixrl.common.messages import Prompt

SHOWN_BAD_ROWS = 10


class Problem(msgspec.Struct, frozen=True):
    """One problem; `family` is "" where the data names none."""

    prompt_id: str
    question: str
    gold: str
    family: str = ""

    def prompt(self) -> Prompt:
        """What workers see of it."""
        return Prompt(self.prompt_id, self.question, self.gold)


def load(path: str, data: DataConfig) -> list[Problem]:
    """Read a JSONL file.

    Raises:
        DataError: naming every bad row (up to ten) with its reason, or the file when it holds no problem.
    """
    problems: list[Problem] = []
    bad: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            problem = _problem(msgspec.json.decode(line, type=dict[str, object]), data)
        except (ValueError, msgspec.MsgspecError) as error:
            bad.append(f"  row {number}: {error}")
            continue
        if problem.prompt_id in seen:
            bad.append(
                f"  row {number}: id {problem.prompt_id!r} stands in row {seen[problem.prompt_id]} already"
            )
            continue
        seen[problem.prompt_id] = number
        problems.append(problem)
    if bad:
        rest = f"\n  and {len(bad) - SHOWN_BAD_ROWS} more" if len(bad) > SHOWN_BAD_ROWS else ""
        raise DataError(
            f"{path}: {len(bad)} bad rows; mend or remove them\n"
            + "\n".join(bad[:SHOWN_BAD_ROWS])
            + rest
        )
    if not problems:
        raise DataError(f"{path} holds no problem; expected one JSON object per line")
    return problems


def _lines(path: str) -> list[bytes]:
    try:
        return Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _problem(row: dict[str, object], data: DataConfig) -> Problem:
    def text(column: str) -> str:
        if column not in row:
            raise ValueError(f"no column {column!r}; the row has {', '.join(sorted(row))}")
        value = row[column]
        if (
            isinstance(value, bool)
            or not isinstance(value, (str, int, float))
            or not str(value).strip()
        ):
            raise ValueError(f"column {column!r} is {value!r}; expected text or a number")
        return str(value)

    family = text(data.family_column) if data.family_column else ""
    return Problem(
        text(data.id_column), text(data.question_column), text(data.answer_column), family
    )
