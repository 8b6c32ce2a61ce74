"""The run file: what is accepted, how settings go over it, and that every refusal says what, where and what to do."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixrl.common.config import RunConfig, from_json, load
from prefixrl.common.errors import ConfigError

MINIMAL = """
directory = "run"

[adapter]
model = "adapter"

[target]
model = "org/target"

[data]
train = "train.jsonl"

[algorithm]
iterations = 3
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "train.jsonl").write_text("{}\n", encoding="utf-8")
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def refusal(run_file: Path, *settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(run_file, settings)
    return str(caught.value)


def test_paths_are_relative_to_the_run_file_and_the_directory_to_where_one_stands(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = run_file.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load(Path("..") / "run.toml")
    assert config.directory == str(elsewhere / "run")
    assert config.adapter.model == str(run_file.parent / "adapter")
    assert config.data.train == str(run_file.parent / "train.jsonl")
    assert config.target.model == "org/target", "a hub name stays as it is"


def test_what_is_not_given_has_its_default(run_file: Path) -> None:
    config = load(run_file)
    assert (config.seed, config.algorithm.max_staleness, config.algorithm.clip) == (42, 2, 0.2)
    assert config.algorithm.correction == "decoupled"


def test_a_config_survives_the_wire(run_file: Path) -> None:
    config = load(run_file, ('learner.deepspeed={zero_optimization={stage=3}, a=[1, 2.5, "x"]}',))
    assert from_json(config.model_dump_json()) == config


@given(
    st.floats(1e-12, 1e6),
    st.integers(1, 10**9),
    st.sampled_from(["token", "sequence"]),
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=3),
)
def test_every_value_survives_the_wire(
    number: float, count: int, aggregation: str, texts: list[str]
) -> None:
    document: dict[str, Any] = {
        "directory": "run",
        "adapter": {"model": "a/b"},
        "target": {"model": "a/c"},
        "data": {"train": "x"},
        "algorithm": {"iterations": count, "aggregation": aggregation, "kl": number},
        "evaluation": {"fixed_prefixes": texts},
    }
    config = RunConfig.model_validate(document)
    assert from_json(config.model_dump_json()) == config


def test_a_config_of_another_release_is_refused_as_such(run_file: Path) -> None:
    text = load(run_file).model_dump_json().replace('"seed"', '"sead"')
    with pytest.raises(ConfigError, match=r"(?s)written by another one.*sead"):
        from_json(text)


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_go_over_the_file_and_the_last_one_wins(run_file: Path) -> None:
    config = load(
        run_file,
        (
            "algorithm.kl=0.5",
            "algorithm.kl=1e-2",
            " seed = 7",
            "rollout.engine=transformers",
            'scorer.engine="simulated"',
            "directory=some/where",
            "scorer.keep_completions=true",
            'evaluation.fixed_prefixes=["Let us: ", "=b"]',
            "learner.deepspeed.zero_optimization.stage=2",
        ),
    )
    assert (config.algorithm.kl, config.seed) == (1e-2, 7)
    assert (config.rollout.engine, config.scorer.engine) == ("transformers", "simulated")
    assert config.directory.endswith("/some/where")
    assert config.scorer.keep_completions is True
    assert config.evaluation.fixed_prefixes == ("Let us: ", "=b")
    assert config.learner.deepspeed == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize("setting", ["algorithm.kl", "", "=3", " = 3"])
def test_a_setting_without_key_or_value_is_refused_with_an_example(
    run_file: Path, setting: str
) -> None:
    message = refusal(run_file, setting)
    assert message == (f"--set {setting!r} is not KEY=VALUE, for example --set algorithm.kl=1e-3")


def test_a_setting_below_a_value_is_refused(run_file: Path) -> None:
    message = refusal(run_file, "directory.name=x")
    assert message == "--set 'directory.name=x': directory is not a section of the run file"


# --- refusals --------------------------------------------------------------------------------------------------------

ONE_LINE: dict[str, tuple[str, str]] = {
    "a misspelt key": (
        "algorithm.max_stalenes=1",
        "algorithm.max_stalenes: unknown key; did you mean 'max_staleness'?",
    ),
    "a misspelt section": ("rolout.threads=1", "rolout: unknown key; did you mean 'rollout'?"),
    "a key that resembles none": (
        "adapter.zzzzzz=1",
        "adapter.zzzzzz: unknown key; known keys: model",
    ),
    "a wrong type": (
        "algorithm.minibatches=many",
        'algorithm.minibatches = "many": Input should be a valid integer',
    ),
    "a value out of range": (
        "algorithm.gamma=1.5",
        "algorithm.gamma = 1.5: Input should be less than or equal to 1",
    ),
    "a choice that is none": (
        "algorithm.correction=both",
        "algorithm.correction = \"both\": Input should be 'decoupled', 'behaviour' or 'none'",
    ),
    "zero groups": (
        "algorithm.groups_per_iteration=0",
        "algorithm.groups_per_iteration = 0: Input should be greater than 0",
    ),
    "no number": ("algorithm.kl=nan", "algorithm.kl = NaN: Input should be a finite number"),
    "an infinite bonus": (
        "algorithm.entropy=inf",
        "algorithm.entropy = Infinity: Input should be a finite number",
    ),
    "a value for a section": ("learner=3", "learner = 3: Input should be a valid dictionary"),
    "k1 in the loss": (
        "algorithm.kl_placement=loss",
        "algorithm: kl_estimator = 'k1' with kl_placement = 'loss': k1 in a loss has a zero expected gradient and k2/k3 "
        "in a reward are biased; with 'loss' use k2 or k3",
    ),
    "k3 in the reward": (
        "algorithm.kl_estimator=k3",
        "algorithm: kl_estimator = 'k3' with kl_placement = 'reward': k1 in a loss has a zero expected gradient and "
        "k2/k3 in a reward are biased; with 'reward' use k1",
    ),
    "two lengths": (
        "data.epochs=2",
        "algorithm.iterations = 3 and data.epochs = 2: give exactly one, it ends the run",
    ),
    "more minibatches than rows": (
        "algorithm.minibatches=5000",
        "algorithm.minibatches = 5000 exceeds the 4096 rows of an iteration (groups_per_iteration x samples_per_prompt)",
    ),
    "a silence shorter than the heartbeat allows": (
        "broker.silence_s=2.5",
        "broker: silence_s = 2.5 must be at least three times heartbeat_s = 1, or one late heartbeat ends a healthy worker",
    ),
}


@pytest.mark.parametrize(("setting", "expected"), ONE_LINE.values(), ids=ONE_LINE.keys())
def test_a_refusal_names_file_key_value_and_remedy(
    run_file: Path, setting: str, expected: str
) -> None:
    head, line = refusal(run_file, setting).split("\n")
    assert head == f"{run_file}: 1 problem"
    assert line.startswith(f"  {expected}")


def test_all_problems_are_told_at_once(run_file: Path) -> None:
    head, *lines = refusal(run_file, "algorithm.clip=0", "seed=-1", "data.tain=x").split("\n")
    assert head == f"{run_file}: 3 problems"
    assert {line.split()[0].rstrip(":") for line in lines} == {
        "algorithm.clip",
        "seed",
        "data.tain",
    }


def test_a_run_without_a_length_is_refused(run_file: Path) -> None:
    run_file.write_text(MINIMAL.replace("iterations = 3", ""), encoding="utf-8")
    assert "algorithm.iterations = None and data.epochs = None: give exactly" in refusal(run_file)
    assert load(run_file, ("data.epochs=2",)).iterations_in_all(1000) == 4


def test_a_missing_key_is_named(run_file: Path) -> None:
    run_file.write_text(MINIMAL.replace('train = "train.jsonl"', ""), encoding="utf-8")
    assert refusal(run_file).split("\n")[1:] == ["  data.train: missing"]


@pytest.mark.parametrize(
    ("name", "looked_at"), [("./gone", "gone"), ("gone", "gone"), ("a/b/c", "a/b/c")]
)
def test_a_missing_model_is_refused_with_where_it_was_looked_for(
    run_file: Path, name: str, looked_at: str
) -> None:
    assert refusal(run_file, f"target.model={name}") == (
        f"target.model = {name!r}: there is no such folder (looked at {run_file.parent / looked_at}) "
        "and it is no hub name (org/name)"
    )


def test_a_missing_data_file_is_refused_with_where_it_was_looked_for(run_file: Path) -> None:
    for key in ("train", "eval"):
        assert refusal(run_file, f"data.{key}=gone.jsonl") == (
            f"data.{key} = 'gone.jsonl': there is no such file (looked at {run_file.parent / 'gone.jsonl'})"
        )


def test_an_unreadable_run_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert refusal(path) == f"cannot read the run file {path}: No such file or directory"
    path.write_text("seed = = 3", encoding="utf-8")
    assert refusal(path).startswith(f"{path} is not valid TOML: ")
    path.write_bytes(b"directory = '\xff'")
    assert refusal(path).startswith(f"{path} is not valid TOML: ")
    assert refusal(tmp_path) == f"cannot read the run file {tmp_path}: Is a directory"
