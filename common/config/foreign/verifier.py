"""The record of a verifier that rows name by `code`: a built-in one, or one of an installed package.

A package adds one by an entry point (`plugins.py`):

    # my_package/lean.py
    def check(question: str, text: str, gold: str) -> float:
        return float(proves(text, gold))

    VERIFIER = AnswerVerifier("lean", check)

    # pyproject.toml
    [project.entry-points."prefixrl.verifiers"]
    lean = "my_package.lean:VERIFIER"

Rows of a source with `code = "lean"` are then judged by `check`, in a child process of a scorer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from prefixrl.common.config.foreign.plugins import check_names, load_plugin, plugins
from prefixrl.common.errors import ConfigError

MATHEMATICS = "none"
"""Value of `code` for the comparison with the gold answer, which needs no program."""
SANDBOXED = ("answers", "tests")
"""Values of `code` with which programs are run; `data.code` explains them."""
BUILT_IN = (MATHEMATICS, *SANDBOXED)
WITH_MATHEMATICAL_GOLD = (MATHEMATICS, "answers")
"""Values of `code` whose gold answers are mathematics. The other verifiers have gold answers of a form of their own."""


@dataclass(frozen=True)
class AnswerVerifier:
    """A way to judge the answers of the rows whose `code` is its name."""

    name: str
    function: Callable[..., object]
    """Called as `function(question, text, gold)`; a parameter `settings` gets the JudgeSettings. It returns what a
    reward function may (`docs/verification.md`), and is killed after `scorer.verify_timeout_s`."""
    find: Callable[[str], str | None] | None = None
    """Finds in a text what is judged. None: the whole text is."""
    falls_back: bool = False
    """True: a text in which `find` finds nothing is judged as mathematics. False: it has no answer."""
    sandbox_runs: int = 0
    """Number of programs that it runs in the sandbox for an answer, each of them up to the time limit."""


def check_verifier(name: str) -> str:
    """Return the name of a verifier; raises ValueError if there is none of that name."""
    check_names("verifiers", BUILT_IN)
    if name in BUILT_IN or name in plugins("verifiers"):
        return name
    choices = ", ".join(map(repr, (*BUILT_IN, *plugins("verifiers"))))
    raise ValueError(
        f"is none of {choices}; another verifier is added by installing a package that has it (docs/verification.md)"
    )


@cache
def load_verifier(name: str) -> AnswerVerifier:
    """Import a verifier of an installed package; raises ConfigError, which names the package."""
    plugin = plugins("verifiers").get(name)
    if plugin is None:
        raise ConfigError(f"no installed package adds a verifier {name!r}; install it on this host")
    member = load_plugin(plugin, AnswerVerifier, f"an AnswerVerifier with the name {name!r}")
    if member.name != name:
        raise ConfigError(
            f"{plugin.package} adds {plugin.name!r} to prefixrl.verifiers, but {plugin.target} has the name "
            f"{member.name!r}; both must be the same: ask the author of the package"
        )
    return member
