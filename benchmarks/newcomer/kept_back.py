"""Three tasks on which defaults are shown, and that none was chosen on. Pure.

operations   four operations on two digits; the adapter was taught to write the first opening in six rows of ten
coins        five kinds of coins, asked in two ways; openings of a dozen words
codes        eight rules, each with a question of its own; every other opening earns nothing
"""

from collections.abc import Callable, Mapping

from benchmarks.newcomer.tasks import Kind, Task


def _on_digits(word: str, opening: str, result: Callable[[int, int], int]) -> Kind:
    """A kind of question about the two digits of its number."""
    return Kind(
        (f"{word} the digits of {{}}.",), opening, lambda number: result(*divmod(number, 10))
    )


def _coins(coin: str, pence: int, opening: str) -> Kind:
    questions = (f"How many pence are {{}} {coin}?", f"Change {{}} {coin} into pence.")
    return Kind(questions, opening, lambda number: pence * number)


def _code(name: str, opening: str, result: Callable[[int], int]) -> Kind:
    return Kind((f"What is the {name} code of {{}}?",), opening, result)


OPERATIONS = (
    _on_digits("Add", "Put both together.", lambda tens, ones: tens + ones),
    _on_digits("Compare", "Take one away from the other.", lambda tens, ones: abs(tens - ones)),
    _on_digits("Multiply", "One as often as the other says.", lambda tens, ones: tens * ones),
    _on_digits("Exchange", "The last one comes first.", lambda tens, ones: 10 * ones + tens),
)
COINS = (
    _coins("farthings", 3, "These are small ones, and three of the new pence go for each."),
    _coins("groats", 4, "A groat was worth four pence in all the years that it was made."),
    _coins("shillings", 12, "There are twelve pence in each of them, so we take it twelve times."),
    _coins("florins", 24, "Two shillings make one, which is twenty-four pence for every coin."),
    _coins("crowns", 60, "Five shillings make one, and so it comes to sixty pence a coin."),
)
CODES = (
    _code("red", "Three times.", lambda number: 3 * number),
    _code("blue", "Seven more.", lambda number: number + 7),
    _code("green", "Out of a hundred.", lambda number: 100 - number),
    _code("white", "A five behind.", lambda number: 10 * number + 5),
    _code("black", "Its double and one.", lambda number: 2 * number + 1),
    _code("brown", "Thirty before it.", lambda number: 300 + number),
    _code("pink", "Nine times.", lambda number: 9 * number),
    _code("gold", "Ten times, less one.", lambda number: 10 * number - 1),
)
KEPT_BACK: Mapping[str, Task] = {
    "operations": Task(OPERATIONS, range(12, 100), "llama", (128, 4, 384), 800, habit=0.6),
    "coins": Task(COINS, range(2, 50), "qwen2"),
    "codes": Task(CODES, range(2, 42), "gpt2", (128, 4, 384), 800),
}
