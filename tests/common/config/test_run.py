"""The run file: accepted values, settings over it, and refusals that name fault, key and remedy."""

import math
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prefixrl.common.config.algorithm import FilterConfig, is_within
from prefixrl.common.config.load import changed, from_json, load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.section import Section
from prefixrl.common.errors import ConfigError
from prefixrl.learner.broker.groups.filtering import AccuracyFilter

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


def test_a_run_begins_with_the_newest_checkpoint_of_another_and_never_with_its_own(
    run_file: Path,
) -> None:
    folder, directory = run_file.parent, f"directory={run_file.parent}/run"
    for run, iteration in (("first", 3), ("first", 12), ("run", 5)):
        (folder / run / f"checkpoints/step_{iteration:08d}/hf").mkdir(parents=True)
    (folder / "first/checkpoints/best").symlink_to("step_00000003")
    for name, iteration in (
        ("first", 12),
        ("first/checkpoints/best", 3),
        ("first/checkpoints/step_00000012", 12),
    ):
        adapter = load(run_file, (directory, f"adapter.init_from={name}")).adapter
        assert adapter.start == f"{folder}/first/checkpoints/step_{iteration:08d}/hf"
        assert adapter.model == str(folder / "adapter") and adapter.reference == "start"
    assert load(run_file).adapter.start == str(folder / "adapter")
    assert "is neither a run with a checkpoint nor a checkpoint" in refusal(
        run_file, "adapter.init_from=adapter"
    )
    own = refusal(run_file, directory, "adapter.init_from=run")
    assert "lies in the run's own directory" in own and f"prefixrl resume {folder}/run" in own


def test_paths_are_relative_to_the_run_file_and_the_directory_to_where_one_stands(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = run_file.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load(Path("..") / "run.toml")
    assert config.directory == str(elsewhere / "run")
    assert config.adapter.model == str(run_file.parent / "adapter")
    assert [source.path for source in config.data.train] == [str(run_file.parent / "train.jsonl")]
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


@pytest.mark.parametrize("setting", ["top_p=0.9", "top_k=50", "min_p=0.1"])
def test_sampling_that_biases_the_ratio_must_be_asked_for_by_name(
    run_file: Path, setting: str
) -> None:
    key, value = setting.split("=")
    with pytest.raises(ConfigError, match=rf"rollout: {key} = {value}.*allow_biased_ratios = true"):
        load(run_file, (f"rollout.{setting}",))
    asked = load(run_file, (f"rollout.{setting}", "rollout.allow_biased_ratios=true"))
    assert getattr(asked.rollout_sampling(), key) == float(value)
    target = load(run_file, (f"scorer.{setting}",))
    assert getattr(target.scorer_sampling(), key) == float(value)


def test_an_engine_that_cannot_swap_in_flight_is_refused_with_both_named(run_file: Path) -> None:
    transfer = 'rollout.vllm.options={kv_transfer_config={kv_role="kv_both"}}'
    with pytest.raises(
        ConfigError, match=r'swap = "in_flight" with vllm.options.kv_transfer_config'
    ):
        load(run_file, (transfer, "rollout.swap=in_flight"))
    assert load(run_file, (transfer,)).rollout.swap == "drain"
    assert load(run_file, ("rollout.swap=in_flight",)).rollout.swap == "in_flight"


def test_bitwise_texts_are_refused_where_they_could_not_be_kept(run_file: Path) -> None:
    for setting in ("rollout.engine=vllm", "scorer.engine=vllm"):
        with pytest.raises(
            ConfigError, match=r'bitwise = true with \w+.engine = "vllm".*leave one of them out'
        ):
            load(run_file, ("bitwise=true", setting))
    with pytest.raises(
        ConfigError, match=r'bitwise = true with rollout.swap = "in_flight".*leave one of them out'
    ):
        load(run_file, ("bitwise=true", "rollout.swap=in_flight"))
    with pytest.raises(
        ConfigError,
        match=r"bitwise = true with scorer.cache_bytes = 1048576.*leave one of them out",
    ):
        load(run_file, ("bitwise=true", "scorer.temperature=0.0", "scorer.cache_bytes=1048576"))
    assert load(run_file, ("bitwise=true", "scorer.engine=simulated")).bitwise


def test_an_embedded_engine_seats_four_tasks_and_with_bitwise_one(run_file: Path) -> None:
    settings = (
        "rollout.groups_per_task=4",
        "algorithm.samples_per_prompt=8",
        "scorer.continuations=3",
    )
    config = load(run_file, settings)
    assert (config.embedded_seats("rollout"), config.embedded_seats("scorer")) == (128, 384)
    bitwise = load(run_file, (*settings, "bitwise=true"))
    assert (bitwise.embedded_seats("rollout"), bitwise.embedded_seats("scorer")) == (32, 96)


def test_a_task_whose_result_no_message_could_carry_is_refused(run_file: Path) -> None:
    settings = ("rollout.groups_per_task=64", "algorithm.samples_per_prompt=64")
    with pytest.raises(
        ConfigError, match=r"groups_per_task = 64 .* may have 64 MiB, allowed are 48"
    ):
        load(run_file, (*settings, "rollout.prefix_tokens=2048"))
    with pytest.raises(ConfigError, match=r"scorer.continuations = 2000 .* may have 125 MiB"):
        load(run_file, ("rollout.groups_per_task=8", "scorer.continuations=2000"))
    load(run_file, (*settings, "rollout.prefix_tokens=1024"))


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


def test_a_section_that_a_resolved_config_lacks_can_be_set_over_it(run_file: Path) -> None:
    config = load(run_file)
    assert config.scorer.prm is None
    settings = ("scorer.prm.model=org/model", "scorer.prm.format=two_class")
    actual = changed(config, settings, "--set").scorer.prm
    assert actual is not None and (actual.model, actual.format) == ("org/model", "two_class")


def test_null_takes_a_key_out_of_the_file_and_is_refused_where_there_is_none(
    run_file: Path,
) -> None:
    run_file.write_text(run_file.read_text() + "\n[learner.lora]\nrank = 4\n")
    assert (
        load(run_file).learner.lora and load(run_file, ("learner.lora=null",)).learner.lora is None
    )
    assert load(run_file, ("seed=7", "seed = null")).seed == load(run_file).seed
    assert refusal(run_file, "learner.lore=null").endswith(
        "null takes a key out of the run file, which has no learner.lore"
    )


def test_a_setting_below_a_value_is_refused(run_file: Path) -> None:
    message = refusal(run_file, "directory.name=x")
    assert message == "--set 'directory.name=x': directory is not a section of the run file"


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (("algorithm.iterations=null", "data.epochs=2"), "data.epochs = 2: a pass would not ask"),
        (("algorithm.samples_per_prompt=1",), "samples_per_prompt = 1: a group of one row never"),
    ],
)
def test_problems_are_asked_by_outcome_only_where_groups_differ_and_nothing_ends_the_data(
    run_file: Path, settings: tuple[str, ...], refusal: str
) -> None:
    by_outcome = "data.sampling=by_outcome"
    assert load(run_file, (by_outcome,)).data.sampling == "by_outcome"
    with pytest.raises(ConfigError, match=refusal):
        load(run_file, (by_outcome, *settings))


def test_a_band_is_accepted_exactly_if_some_group_of_right_and_wrong_rows_passes_it() -> None:
    tenths = [step / 10 for step in range(11)]
    for samples, low, high in product(range(1, 11), tenths, tenths):
        if low > high or (low, high) == (0.0, 1.0):
            continue
        band = AccuracyFilter(low, high, 1, 0.0)
        can_pass = any(
            band.objection([1.0] * right + [0.0] * (samples - right)) is None
            for right in range(samples + 1)
        )
        # Counted in tenths of rows, so that nothing is rounded.
        assert can_pass == any(
            round(10 * low) * samples <= 10 * right <= round(10 * high) * samples
            for right in range(samples + 1)
        )
        refused = nullcontext() if can_pass else pytest.raises(ValueError, match="no group can")
        with refused:
            FilterConfig(accuracy=(low, high)).check_reachable(samples)


def test_with_several_continuations_a_band_between_rows_can_be_hit(run_file: Path) -> None:
    band = ("filter.accuracy=[0.3, 0.37]", "scorer.continuations=2")
    assert load(run_file, band).filter.accuracy == (0.3, 0.37)
    said = refusal(run_file, "filter.accuracy=[0.33, 0.35]", "scorer.continuations=2")
    assert (
        "filter.accuracy = [0.33, 0.35] with algorithm.samples_per_prompt = 8 and scorer.continuations = 2: no group "
        "can pass, its mean reward is one of 0/16 ... 16/16; the nearest are 0.312 and 0.375; widen the band"
        in said
    )


def test_only_training_has_several_continuations(run_file: Path) -> None:
    several = load(run_file, ("scorer.continuations=4",)).scorer
    assert (several.texts_per_row("train"), several.texts_per_row("eval")) == (4, 1)


@pytest.mark.parametrize(
    "where", ["data.code=tests", 'data.train=[{path="train.jsonl", code="tests"}]']
)
def test_a_share_of_passed_tests_can_hit_any_band(run_file: Path, where: str) -> None:
    band = ("filter.accuracy=[0.3, 0.37]",)
    assert load(run_file, (*band, where)).filter.accuracy == (0.3, 0.37)
    assert "no group can pass" in refusal(run_file, *band, "data.code=answers")
    assert "no group can pass" in refusal(
        run_file, *band, 'data.eval=[{path="train.jsonl", code="tests"}]'
    )


def test_a_band_that_only_fractions_can_hit_wants_a_reward_function(run_file: Path) -> None:
    (run_file.parent / "mine.py").write_text("def score(question, answer, gold):\n    return 0.4\n")
    settings = ("filter.accuracy=[0.3, 0.45]", "algorithm.samples_per_prompt=2")
    assert "no group can pass" in refusal(run_file, *settings)
    config = load(run_file, (*settings, "reward.function=mine.py:score"))
    assert config.filter.accuracy == (0.3, 0.45)
    assert from_json(config.model_dump_json()) == config


@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_the_band_is_the_same_for_the_config_and_for_the_broker(
    low: float, high: float, rewards: list[float]
) -> None:
    mean = math.fsum(rewards) / len(rewards)
    is_trained = AccuracyFilter(low, high, 1, 0.0).objection(rewards) is None
    assert is_within(mean, low, high) == is_trained


def test_the_filter_survives_the_wire_and_is_off_when_absent(run_file: Path) -> None:
    config = load(run_file, ("filter.accuracy=[0.01, 0.99]", "filter.over_sampling=1.5"))
    assert from_json(config.model_dump_json()) == config
    assert config.filter.accuracy == (0.01, 0.99)
    assert load(run_file).filter == FilterConfig()
    assert from_json(load(run_file).model_dump_json()).filter == FilterConfig()


def test_an_engine_with_keys_of_its_own_takes_no_engine_options(run_file: Path) -> None:
    for engine in ("auto", "vllm", "transformers"):
        with pytest.raises(ConfigError, match="this engine takes none"):
            load(run_file, (f"scorer.engine={engine}", "scorer.engine_options={ limit = 3 }"))


def test_all_problems_are_reported_at_once(run_file: Path) -> None:
    head, *lines = refusal(run_file, "algorithm.clip=0", "seed=-1", "data.tain=x").split("\n")
    assert head == f"{run_file} with --set: 3 problems"
    assert {line.split()[0].rstrip(":") for line in lines} == {
        "algorithm.clip",
        "seed",
        "data.tain",
    }


def test_a_run_without_a_length_is_refused(run_file: Path) -> None:
    run_file.write_text(MINIMAL.replace("iterations = 3", ""), encoding="utf-8")
    assert "algorithm.iterations absent with data.epochs absent: give exactly" in refusal(run_file)
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
        "and it is not a hub name (org/name)"
    )


def test_a_missing_data_file_is_refused_with_where_it_was_looked_for(run_file: Path) -> None:
    for key in ("train", "eval"):
        assert refusal(run_file, f"data.{key}=gone.jsonl").startswith(
            f"data.{key} = 'gone.jsonl': there is no such file or folder (looked at {run_file.parent / 'gone.jsonl'}), "
            f"and no problem set of that name. Known problem sets: gsm8k, math, "
        )
    assert refusal(run_file, "data.paths.math=/gone").endswith(
        "there is no such file or folder (looked at /gone)"
    )


def test_an_unreadable_run_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    assert refusal(path) == f"cannot read the run file {path}: No such file or directory"
    path.write_text("seed = = 3", encoding="utf-8")
    assert refusal(path).startswith(f"{path} is not valid TOML: ")
    path.write_bytes(b"directory = '\xff'")
    assert refusal(path).startswith(f"{path} is not valid TOML: ")
    assert refusal(tmp_path).startswith(f"{tmp_path} is a folder; give the run file")


DIRECT = MINIMAL.replace('[target]\nmodel = "org/target"\n', "").replace(
    "directory", 'mode = "direct"\ndirectory', 1
)
MEANINGLESS_IN_DIRECT = {
    "scorer.stop_tokens": "[3]",
    "scorer.own_stops": "true",
    "rollout.prefix_tokens": "32",
    "scorer.engine": "auto",
    "scorer.engine_options": "{}",
    "scorer.max_new_tokens": "7",
    "scorer.temperature": "0.0",
    "scorer.top_k": "5",
    "scorer.top_p": "0.9",
    "scorer.min_p": "0.1",
    "scorer.max_prompt_tokens": "9",
    "scorer.device": "cpu",
    "scorer.threads": "2",
    "scorer.vllm": "{max_num_seqs=4}",
    "scorer.openai": '{url="http://there/v1"}',
    "scorer.continuations": "1",
    "scorer.cache_bytes": "0",
    "scorer.stop_when_answered": "true",
    "simulated.completion_s": "0.1",
    "simulated.completion_sigma": "0.5",
    "simulated.completion_limit_s": "2",
    "simulated.accuracy": "0.5",
    "evaluation.max_new_tokens": "5",
    "evaluation.fixed_prefixes": '["a"]',
    "evaluation.selection_problems": "3",
    "evaluation.sampled_candidates": "2",
}


@pytest.fixture
def direct_file(run_file: Path) -> Path:
    run_file.write_text(DIRECT, encoding="utf-8")
    return run_file


def test_direct_mode_has_no_target_and_a_length_of_its_own(direct_file: Path) -> None:
    config = load(direct_file, ("rollout.answer_tokens=24",))
    assert config.target is None
    assert config.max_sampled_tokens == 24
    assert config.model_of("rollout") == config.model_of("scorer") == config.adapter.model
    assert from_json(config.model_dump_json()) == config


def test_prefix_mode_samples_a_prefix_and_scores_with_the_target(run_file: Path) -> None:
    config = load(run_file, ("rollout.prefix_tokens=24",))
    assert config.max_sampled_tokens == 24
    assert config.model_of("scorer") == "org/target"


def test_the_modes_want_a_target_or_refuse_it(run_file: Path) -> None:
    assert refusal(run_file, "mode=direct").split("\n")[1:] == [
        '  target.model = "org/target" with mode = "direct": the adapter writes the whole answer; leave [target] out, '
        'or use mode = "prefix"'
    ]
    run_file.write_text(DIRECT, encoding="utf-8")
    assert refusal(run_file, "mode=prefix").split("\n")[1:] == [
        '  mode = "prefix" with target absent: give [target] model, which completes the answers, or use mode = "direct"'
    ]


@pytest.mark.parametrize(("key", "value"), MEANINGLESS_IN_DIRECT.items())
def test_a_key_without_meaning_in_direct_mode_is_refused_with_both_named(
    direct_file: Path, key: str, value: str
) -> None:
    message = refusal(direct_file, f"{key}={value}")
    assert f"  {key} = " in message
    assert 'has no effect with mode = "direct": ' in message
    assert message.endswith(f'leave {key.partition(".")[2]} out, or use mode = "prefix"')


def test_the_table_of_modes_names_every_key_that_is_tested_and_no_other() -> None:
    tested = {tuple(key.split(".")) for key in (*MEANINGLESS_IN_DIRECT, "rollout.answer_tokens")}
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    named = {
        (name, key)
        for name, section in sections.items()
        if isinstance(section, type) and issubclass(section, Section)
        for key in section.ONLY_IN_MODE
    }
    assert tested == named


def test_a_prefix_run_refuses_the_length_of_answers(run_file: Path) -> None:
    assert refusal(run_file, "rollout.answer_tokens=2048").split("\n")[1:] == [
        '  rollout.answer_tokens = 2048 has no effect with mode = "prefix": the length of a prefix is '
        'rollout.prefix_tokens; leave answer_tokens out, or use mode = "direct"'
    ]


def test_a_resolved_config_is_refused_for_values_that_differ_from_the_default_only(
    direct_file: Path,
) -> None:
    text = load(direct_file).model_dump_json()
    with pytest.raises(ConfigError, match=r"rollout\.prefix_tokens = 9 has no effect"):
        from_json(text.replace('"prefix_tokens":32', '"prefix_tokens":9'))


SERVED = ("scorer.engine=openai", "scorer.openai.url=http://there:8000/v1/")


def test_a_served_target_has_an_address_and_survives_the_wire(run_file: Path) -> None:
    config = load(run_file, SERVED)
    assert config.scorer.openai.url == "http://there:8000/v1"
    assert from_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SERVED[:1], 'scorer: engine = "openai" with openai.url absent: give the address'),
        (
            (*SERVED, "scorer.openai.url=there:8000"),
            "'there:8000' is not an address like http://HOST:PORT/v1",
        ),
        (
            (*SERVED, "scorer.openai.url=http://there:abc/v1"),
            "'http://there:abc/v1' is not an address like",
        ),
        (
            (*SERVED, "scorer.openai.url=http://1.2.3.999/v1"),
            "'http://1.2.3.999/v1' is not an address like",
        ),
        (
            (*SERVED, "scorer.openai.dialect=openai", "scorer.top_k=3"),
            "scorer: top_k = 3 with openai.dialect",
        ),
        (
            (*SERVED, "scorer.openai.request_s=600"),
            "scorer.openai.request_s = 600 with broker.stall_s = 600",
        ),
        (
            (*SERVED, "scorer.openai.patience_s=3600"),
            "scorer.openai.patience_s = 3600 with learner.batch_timeout_s",
        ),
        (("rollout.engine=openai",), "rollout.engine: 'openai' is no engine of a rollout; allowed"),
    ],
)
def test_an_endpoint_that_cannot_be_asked_is_refused(
    run_file: Path, settings: tuple[str, ...], said: str
) -> None:
    assert said in refusal(run_file, *settings)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("scorer.openai.url=http://me:sk-Secret@there/v1", id="a password"),
        pytest.param(
            "scorer.openai.url=http://me:sk-Secret/x@there/v1", id="a password with a slash"
        ),
        pytest.param("scorer.openai.url=http://there/v1?key=sk-Secret", id="a key in the query"),
        pytest.param("scorer.openai.key_variable=sk-Secret", id="a key for a variable"),
        pytest.param("scorer.openai.key_variable=hf_Secret", id="a token for a variable"),
    ],
)
def test_a_key_in_the_config_is_refused_and_not_repeated(run_file: Path, setting: str) -> None:
    message = refusal(run_file, *SERVED, setting)
    assert "environment" in message and "Secret" not in message


def test_nothing_goes_on_with_a_cut_answer_in_direct_mode(direct_file: Path) -> None:
    said = refusal(direct_file, "scorer.truncated=extend")
    assert 'scorer.truncated = "extend" with mode = "direct"' in said
    assert load(direct_file, ("scorer.truncated=mask",)).scorer.truncated == "mask"


def test_filling_with_groups_that_failed_needs_over_sampling_and_no_limit() -> None:
    with pytest.raises(
        ValidationError, match="over_sampling = 1: groups that fail would be trained"
    ):
        FilterConfig(accuracy=(0.2, 0.8), fill="prioritise")
    with pytest.raises(
        ValidationError, match=r"min_pass_rate = 0\.2 has no effect with fill = .prioritise."
    ):
        FilterConfig(accuracy=(0.2, 0.8), fill="prioritise", over_sampling=2.0, min_pass_rate=0.2)
    assert (
        FilterConfig(accuracy=(0.2, 0.8), fill="prioritise", over_sampling=4.0).fill == "prioritise"
    )


@pytest.mark.parametrize(
    ("settings", "cores", "children"),
    [
        pytest.param((), 128, 4, id="8 groups of 64 rows"),
        pytest.param((), 6, 2, id="an engine beside them"),
        pytest.param((), 2, 1, id="fewer cores than the engine can use"),
        pytest.param(("mode=direct", "target=null"), 2, 1, id="direct on two cores"),
        pytest.param(("mode=direct", "target=null"), 4, 3, id="direct, no engine beside them"),
        pytest.param(("algorithm.groups_per_iteration=2",), 128, 2, id="128 rows"),
        pytest.param(
            ("algorithm.groups_per_iteration=2", "scorer.continuations=2"),
            128,
            4,
            id="128 rows twice",
        ),
        pytest.param(("launch.scorers=8",), 128, 1, id="eight scorers"),
        pytest.param(("scorer.verifier_children=7",), 2, 7, id="as the run file says"),
    ],
)
def test_verifier_children_follow_from_rows_and_cores(
    run_file: Path, settings: tuple[str, ...], cores: int, children: int
) -> None:
    shape = ("algorithm.groups_per_iteration=8", "algorithm.samples_per_prompt=64")
    assert load(run_file, (*shape, *settings)).verifier_children(cores) == children
