"""The base of recursive-descent readers of LaTeX arithmetic: a bounded walk over tokens."""


class NoValueError(Exception):
    """The text is not an expression that is read here, or a bound was reached."""


class TokenReader:
    """A position in a list of tokens."""

    def __init__(self, tokens: list[str], most_tokens: int, most_depth: int) -> None:
        self._tokens = tokens
        self._end = min(len(tokens), most_tokens)
        self._most_depth = most_depth
        self.at = 0

    @property
    def is_done(self) -> bool:
        """True if all tokens are read."""
        return self.at == len(self._tokens)

    def check_depth(self, depth: int) -> None:
        """Raise NoValueError where brackets are nested too deeply."""
        if depth > self._most_depth:
            raise NoValueError

    def next(self) -> str:
        """Return the next token without reading it, "" at the end."""
        return self._tokens[self.at] if self.at < len(self._tokens) else ""

    def take(self) -> str:
        """Read a token."""
        if self.at >= self._end:
            raise NoValueError
        self.at += 1
        return self._tokens[self.at - 1]

    def take_sign(self) -> int:
        """Read any number of plus and minus signs."""
        sign = 1
        while self.next() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return sign

    def expect(self, token: str) -> None:
        """Read this very token."""
        if self.take() != token:
            raise NoValueError
