"""A user's reward function in a verifier child of its own.

    score(question, text, gold)                    judges alone
    score(question, text, gold, verdict)           is handed the verifier's own verdict on the text
    score(question, text, gold, verify)            may ask it: verify(text, gold) gives the verdict on any text
    score(question, text, gold, tokens, finish, prefix, source)    any of them: is handed facts about the answer

It returns a reward, or a dict with `reward` and parts of it, which are logged; with
`reward.weights` a dict of parts.

The verifier's verdict comes from children of its own (`pool.py`): a formula that hangs never costs
the function a call. `verify` has a pool of one child behind it, which half of the function's time
may pass in.
"""

import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping

from prefixrl.common.config.foreign import user_function
from prefixrl.common.errors import ConfigError
from prefixrl.common.run.digests import function_digest
from prefixrl.scorer.verifier.complaints import Complaints
from prefixrl.scorer.verifier.exchange import ChildQuestion
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rewards import scored_answer
from prefixrl.scorer.verifier.rules.verify import Judgement

log = logging.getLogger(__name__)

WARMING = r"\boxed{1+\ln x}", r"\ln x+1"
"""A text and a gold answer that need sympy: `verify` is quick from its first call on."""
WAIT_S = 1.0
RULE = "function"
"""Rule of a verdict that a user's function gave."""

_complaints = Complaints(log)


class Verify:
    """The verifier, for a function to call: waits for the verdict."""

    def __init__(self, timeout_s: int) -> None:
        """`timeout_s` is the limit of one call of the function."""
        self._pool = VerifierPool(1, max(1, timeout_s // 2))
        self._calls = threading.Lock()
        self(*WARMING)

    def __call__(self, text: str, gold: str) -> Judgement:
        """Return the verdict on the last box of a text."""
        with self._calls:
            self._pool.submit(0, text, gold)
            verdicts = self._pool.poll()
            while not verdicts:
                self._pool.wait(WAIT_S)
                verdicts = self._pool.poll()
            return verdicts[0][1]

    def close(self) -> None:
        """End its child."""
        self._pool.close()


class Scoring:
    """A loaded function and its arguments."""

    def __init__(
        self,
        function_ref: str,
        verify: Callable[[str, str], Judgement] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._ref = function_ref
        self._weights = weights or {}
        self._function = user_function.load(function_ref)
        _, by_name = user_function.CALLS[user_function.PLUGGED_IN]
        self.takes = tuple(
            name for name in sorted(by_name) if user_function.takes(self._function, name)
        )
        """Names of what it is handed by name."""
        self._facts = [name for name in user_function.FACTS if name in self.takes]
        self._verify = verify

    def score(self, question: ChildQuestion) -> Judgement:
        """Call the function; anything but a number in [0, 1] is an error with its reason."""
        path = user_function.file_of(self._ref)
        keywords: dict[str, object] = {name: getattr(question.facts, name) for name in self._facts}
        if "verdict" in self.takes:
            keywords["verdict"] = question.verdict
        if self._verify:
            keywords["verify"] = self._verify
        try:
            result = self._call(question, keywords)
            return scored_answer(self._ref, result, RULE, self._weights)
        except (Exception, SystemExit) as error:
            reason = user_function.explain(error, path)
            lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
            last_line = lines[-1] if lines else 0
            if _complaints.is_first((type(error).__name__, last_line), reason):
                log.warning("%s failed", self._ref, exc_info=True)
            return Judgement(0.0, "error", reason, "function raised")

    def _call(self, question: ChildQuestion, keywords: dict[str, object]) -> object:
        caller = os.getpid()
        try:
            return self._function(question.question, question.answer, question.gold, **keywords)
        finally:
            # The function forked, and this is the copy: its answer would be taken for that of the next text.
            if os.getpid() != caller:
                _leave()


def _leave() -> None:
    """End a copy with its own exit code; nothing is cleaned up that the original needs."""
    error = sys.exc_info()[1]
    code = error.code or 0 if isinstance(error, SystemExit) else int(error is not None)
    os._exit(code if isinstance(code, int) else 1)


@contextlib.contextmanager
def loaded(
    function_ref: str, digest: str, timeout_s: int, weights: Mapping[str, float] | None = None
) -> Iterator[Scoring]:
    """Import a user's function; raises ConfigError when it fails, or its file has changed."""
    if function_digest(function_ref) != digest:
        raise ConfigError(
            f"{user_function.file_of(function_ref)} has changed since this run began; restore the file, or start "
            f"a run in another directory"
        )
    user_function.check_call("reward.function", function_ref)
    if not user_function.takes(user_function.load(function_ref), "verify"):
        yield Scoring(function_ref, None, weights)
        return
    with contextlib.closing(Verify(timeout_s)) as verify:
        yield Scoring(function_ref, verify, weights)
