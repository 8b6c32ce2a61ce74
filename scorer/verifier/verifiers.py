"""The judges that a verifier child has: sympy, and the table of verifiers that rows name by `code`.

Each may use up its time or memory, so a child runs it, which can be killed from outside. The code
sandbox is an entry of the table, as the verifiers of installed packages are
(`common/config/foreign/verifier.py`).
"""

import logging
import math
from dataclasses import dataclass
from functools import partial

import msgspec

from prefixrl.common.config.foreign import user_function
from prefixrl.common.config.foreign.verifier import MATHEMATICS, AnswerVerifier, load_verifier
from prefixrl.common.prompts.program_tests import read_tests
from prefixrl.common.wire.messages.groups import Fault
from prefixrl.scorer.sandbox.comparison import is_rounded
from prefixrl.scorer.sandbox.programs import MAX_TESTS, find_program, share_passed, value_of
from prefixrl.scorer.sandbox.runner import GRACE_S, START_S, ProgramLimits, SandboxError
from prefixrl.scorer.verifier.complaints import Complaints
from prefixrl.scorer.verifier.exchange import ChildQuestion
from prefixrl.scorer.verifier.rewards import scored_answer
from prefixrl.scorer.verifier.rules import verify
from prefixrl.scorer.verifier.rules.arithmetic import read_rational
from prefixrl.scorer.verifier.rules.looks import normal_form
from prefixrl.scorer.verifier.rules.verify import SYMPY_RULE, Judgement

log = logging.getLogger(__name__)

CODE_RULE = "code"
"""Rule of a verdict that the code sandbox gave."""

_complaints = Complaints(log)


@dataclass(frozen=True)
class JudgeSettings:
    """Settings of a run that a verifier's function may use."""

    timeout_s: int
    """Limit of one answer."""
    float_tolerance: float
    packages: tuple[str, ...]
    """Packages that programs may import."""


def judge_formula(question: ChildQuestion) -> Judgement:
    """Ask sympy; every failure has an outcome of its own."""
    try:
        if question.is_gold:
            is_right = verify.is_readable(question.gold, question.timeout_s)
        else:
            is_right = verify.verify_with_sympy(question.gold, question.answer, question.timeout_s)
    except verify.UnparsableAnswerError:
        return Judgement(0.0, "parse_fail", None, rule=SYMPY_RULE)
    except (TimeoutError, MemoryError):  # the answer used up its share
        return Judgement(0.0, "timeout", None, rule=SYMPY_RULE)
    except verify.GoldError as error:
        return Judgement(0.0, "error", str(error), "gold answer unreadable")
    except Exception as error:
        log.exception("gold %.100r, answer %.100r", question.gold, question.answer)
        reason = f"the verifier failed: {type(error).__name__}: {error}"
        return Judgement(0.0, "error", reason, "verifier raised")
    return Judgement(float(is_right), "ok", None, rule=SYMPY_RULE)


def judge_with(verifier: AnswerVerifier, question: ChildQuestion) -> Judgement:
    """Call the function of a verifier; anything but a verdict or a reward is an error with its reason."""
    choices = question.choices
    keywords = {}
    if user_function.takes(verifier.function, "settings"):
        keywords["settings"] = JudgeSettings(
            question.timeout_s, choices.float_tolerance, choices.packages
        )
    try:
        result = verifier.function(question.question, question.answer, question.gold, **keywords)
    except (Exception, SystemExit) as error:
        reason = f"the verifier {verifier.name} failed: {type(error).__name__}: {error}"
        if _complaints.is_first((verifier.name, type(error).__name__), reason):
            log.warning("the verifier %s failed", verifier.name, exc_info=True)
        return Judgement(0.0, "error", reason, "function raised")
    if isinstance(result, Judgement):
        return result if verifier.name in SANDBOX else _named_verdict(result, verifier.name)
    return scored_answer(f"the verifier {verifier.name}", result, verifier.name, {})


def _named_verdict(verdict: Judgement, name: str) -> Judgement:
    rule = f"{name}: {verdict.rule}" if verdict.rule else name
    if verdict.status == "error":
        reason, fault = verdict.extracted or "", verdict.fault or "function raised"
        return Judgement(0.0, "error", reason, fault)
    is_unread = verdict.status in ("parse_fail", "timeout", "no_answer")
    reward = 0.0 if is_unread or not math.isfinite(verdict.reward) else verdict.reward
    status = verdict.status if is_unread else "ok"
    return Judgement(reward, status, verdict.extracted, parts=verdict.parts, rule=rule)


# --- the code sandbox -----------------------------------------------------------------------------


def judge_tests(_question: str, program: str, gold: str, settings: JudgeSettings) -> Judgement:
    """Run a program on the tests in the gold answer; its reward is the share of tests passed."""
    try:
        share, is_late = share_passed(
            program,
            read_tests(gold),
            _limits(settings),
            settings.packages,
            settings.float_tolerance,
        )
    except (SandboxError, ValueError, OSError) as error:
        return _without_verdict(error)
    if is_late and not share:
        return Judgement(0.0, "timeout", None, rule=CODE_RULE)
    return Judgement(share, "ok", None, rule=CODE_RULE)


def judge_value(_question: str, program: str, gold: str, settings: JudgeSettings) -> Judgement:
    """Run a program; its value is judged as an answer. A float is right up to rounding."""
    try:
        finished, value = value_of(program, _limits(settings), settings.packages)
    except (SandboxError, ValueError, OSError) as error:
        return _without_verdict(error)
    if finished.status == "timeout":
        return Judgement(0.0, "timeout", None, rule=CODE_RULE)
    if value is None:
        return Judgement(0.0, "parse_fail", None, rule=CODE_RULE)
    number = read_rational(normal_form(gold))
    if number is not None and is_rounded(value, number.value, settings.float_tolerance):
        return Judgement(1.0, "ok", value, rule=f"{CODE_RULE}: float")
    verdict = verify.judge_exactly(gold, value)
    if verdict is None:
        verdict = judge_formula(ChildQuestion(gold, value, settings.timeout_s))
    if verdict.status == "error":
        return verdict
    rule = f"{CODE_RULE}: {verdict.rule}"
    return msgspec.structs.replace(verdict, extracted=value, rule=rule)


def _limits(settings: JudgeSettings) -> ProgramLimits:
    return ProgramLimits(wall_ms=1000 * settings.timeout_s, cpu_s=settings.timeout_s)


def _without_verdict(error: SandboxError | ValueError | OSError) -> Judgement:
    """Return the answer for a failure that is not the program's: an `error`, never a wrong answer."""
    fault: Fault = "sandbox failed"
    if isinstance(error, SandboxError):
        fault = error.fault
    elif isinstance(error, ValueError):
        fault = "gold answer unreadable"
    if _complaints.is_first(("program", fault), str(error)):
        log.warning("no verdict on a program: %s", error)
    return Judgement(0.0, "error", str(error), fault)


# --- the table ------------------------------------------------------------------------------------

SANDBOX = {
    verifier.name: verifier
    for verifier in (
        AnswerVerifier(
            "answers",
            judge_value,
            find=partial(find_program, mode="answers"),
            falls_back=True,
            sandbox_runs=1,
        ),
        AnswerVerifier(
            "tests",
            judge_tests,
            find=partial(find_program, mode="tests"),
            sandbox_runs=MAX_TESTS,
        ),
    )
}
"""The verifiers of this package."""


def find_verifier(name: str) -> AnswerVerifier:
    """Return a verifier; raises ConfigError for one of a package that cannot be imported here."""
    return SANDBOX.get(name) or load_verifier(name)


def is_mathematics(name: str) -> bool:
    """Return True for the comparison with the gold answer, which is no entry of the table."""
    return name == MATHEMATICS


def deadline_s(timeout_s: int, name: str = MATHEMATICS) -> float:
    """Return the seconds from a question after which a silent child is killed."""
    runs = 0 if is_mathematics(name) else find_verifier(name).sandbox_runs
    return runs * (timeout_s + START_S + GRACE_S) + timeout_s + GRACE_S
