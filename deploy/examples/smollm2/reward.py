"""The reward of the SmolLM2 example: is the last number of the answer's first line the gold?"""

import re

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(question: str, answer: str, gold: str) -> float:
    """Return 1.0 where it is, else 0.0; thousands may have commas."""
    numbers = _NUMBER.findall(answer.lstrip().partition("\n")[0].replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(gold))
