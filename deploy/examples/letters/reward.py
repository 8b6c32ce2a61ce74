"""The reward of the letters example, a user's function: the share of right letters."""


def letters_right(question: str, answer: str, gold: str) -> float:
    """Share of places at which the letters after the answer's last colon are the gold's."""
    given = answer.rpartition(":")[2].strip()
    return sum(mine == right for mine, right in zip(given, gold, strict=False)) / max(
        len(given), len(gold)
    )
