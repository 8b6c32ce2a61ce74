"""A verifier that an installed package adds: judged by real children, refused by name where it is broken."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixrl.common.config.foreign import verifier as records
from prefixrl.common.config.foreign.verifier import BUILT_IN, MATHEMATICS, SANDBOXED
from prefixrl.common.config.load import from_json, import_functions, load
from prefixrl.common.errors import ConfigError
from prefixrl.scorer.verifier.exchange import Choices
from prefixrl.scorer.verifier.pool import VerifierPool
from prefixrl.scorer.verifier.rules.verify import Judgement
from prefixrl.scorer.verifier.verifiers import SANDBOX
from support.packages import installed

PATIENCE_S = 60
TIMEOUT_S = 2
PACKAGE = """
import sys
import time

from prefixrl.common.config.foreign.verifier import AnswerVerifier
from prefixrl.scorer.verifier.rules.verify import Judgement

WORDS = list(range(100_000))


def judge(question, text, gold, settings):
    print("a verifier may print")
    match text:
        case "hang":
            time.sleep(60)
        case "raise":
            raise ValueError("no such proof")
        case "leave":
            sys.exit(3)
        case "two":
            return 2.0
        case "parts":
            return {"reward": 0.5, "steps": 3}
        case "late":
            return Judgement(0.0, "timeout", "late", rule="clock")
        case "unread":
            return Judgement(0.0, "parse_fail", "unread")
        case "lost":
            return Judgement(0.0, "error", "no prover", "verifier raised")
        case "settings":
            return settings.timeout_s / 10
    return float((question, text, gold) == ("Is it odd?", "odd", "it is odd"))


PARITY = AnswerVerifier("parity", judge)
OTHER = AnswerVerifier("another name", judge)
"""
ENTRY_POINTS = """[prefixrl.verifiers]
parity = added_parity:PARITY
renamed = added_parity:OTHER
broken = added_broken:VERIFIER
no_record = added_parity:WORDS
"""
RUN_FILE = """
directory = "run"
[adapter]
model = "adapter"
[target]
model = "org/target"
[data]
train = "train.jsonl"
[algorithm]
iterations = 1
"""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed package; children of a pool find it by PYTHONPATH."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "added_broken.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with installed(folder, "added_parity", ENTRY_POINTS, PACKAGE):
        yield folder


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n")
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def judged(*texts: str, code: str = "parity") -> list[Judgement]:
    pool = VerifierPool(2, TIMEOUT_S, choices=Choices(verifiers=("parity",)))
    verdicts: dict[int, Judgement] = {}
    deadline_s = time.monotonic() + PATIENCE_S
    try:
        for key, text in enumerate(texts):
            pool.submit(key, text, "it is odd", "Is it odd?", code)
        while pool.pending:
            assert time.monotonic() < deadline_s
            pool.wait(1.0)
            verdicts |= dict(pool.poll())
    finally:
        pool.close()
    return [verdicts[key] for key in range(len(texts))]


def test_its_rewards_and_verdicts_are_those_of_the_rows_with_its_name() -> None:
    odd, even, parts, late, unread, limit = judged(
        "odd", r"\boxed{even}", "parts", "late", "unread", "settings"
    )
    assert odd == Judgement(1.0, "ok", "", rule="parity")
    assert even == Judgement(0.0, "ok", "even", rule="parity")
    assert parts == Judgement(0.5, "ok", "", parts={"steps": 3.0}, rule="parity")
    assert late == Judgement(0.0, "timeout", "late", rule="parity: clock")
    assert unread == Judgement(0.0, "parse_fail", "unread", rule="parity")
    assert limit.reward == TIMEOUT_S / 10


@pytest.mark.slow
def test_what_is_no_verdict_is_an_error_and_never_a_wrong_answer() -> None:
    began_s = time.monotonic()
    hanging, raising, leaving, two, lost = judged("hang", "raise", "leave", "two", "lost")
    assert {each.status for each in (hanging, raising, leaving, two, lost)} == {"error"}
    assert (hanging.fault, hanging.extracted) == (
        "function overran",
        "the verifier parity: no verdict within 2 s",
    )
    assert time.monotonic() - began_s < 30
    assert (raising.fault, raising.extracted) == (
        "function raised",
        "the verifier parity failed: ValueError: no such proof",
    )
    assert leaving.fault == "function raised"
    assert two.fault == "function returned no reward"
    assert two.extracted is not None and "2.0; a reward is" in two.extracted
    assert (lost.fault, lost.extracted) == ("verifier raised", "no prover")


def test_other_rows_of_the_same_pool_are_mathematics() -> None:
    (verdict,) = judged(r"\boxed{7}", code=MATHEMATICS)
    assert (verdict.reward, verdict.rule) == (0.0, "words")


def test_the_sandbox_is_in_the_same_table() -> None:
    assert tuple(SANDBOX) == SANDBOXED
    assert all(isinstance(each, records.AnswerVerifier) for each in SANDBOX.values())
    assert (MATHEMATICS, *SANDBOX) == BUILT_IN


def test_a_run_file_names_it_by_code(run_file: Path) -> None:
    config = load(run_file, ("data.code=parity",))
    assert config.data.added_verifiers == ("parity",)
    assert not config.data.runs_programs and config.data.has_fractions
    import_functions(config)
    assert from_json(config.model_dump_json()).data.code == "parity"
    train = '{path = "train.jsonl", code = "parity"}'
    assert load(run_file, (f"data.train={train}",)).data.verifiers == {"parity"}
    with pytest.raises(ConfigError) as caught:
        load(run_file, ("data.code=lean",))
    assert "'none', 'answers', 'tests', 'broken', 'no_record', 'parity'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "added_broken:VERIFIER cannot be loaded: ModuleNotFoundError"),
        ("no_record", "expected an AnswerVerifier with the name 'no_record'"),
        ("renamed", "has the name 'another name'; both must be the same"),
    ],
    ids=["import fails", "no record", "other name"],
)
def test_a_broken_one_is_named_with_its_package(run_file: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_functions(load(run_file, (f"data.code={name}",)))
    words = f"added_parity 1.0 adds '{name}' to prefixrl.verifiers, but "
    assert words in str(caught.value) and reason in str(caught.value)


def test_a_broken_one_ends_the_learner_with_exit_code_2(run_file: Path, site: Path) -> None:
    command = [sys.executable, "-m", "prefixrl.learner", str(run_file), "--set", "data.code=broken"]
    environment = os.environ | {"PYTHONPATH": str(site)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert "added_parity 1.0 adds 'broken' to prefixrl.verifiers" in ended.stderr


def test_one_that_is_not_installed_here_is_named() -> None:
    with pytest.raises(ConfigError, match="no installed package adds a verifier 'lean'"):
        records.load_verifier("lean")
