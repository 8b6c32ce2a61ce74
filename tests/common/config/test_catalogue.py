"""Every key of the run file is explained, in the commands and on the page, and found by its names elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.common.config.catalogue import SYNONYMS, settings
from prefixrl.common.config.load import from_flags
from prefixrl.common.errors import ConfigError
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands.config import explained, page
from support.paths import ROOT

KNOWN = {each.key: each for each in settings()}


def test_every_key_and_every_section_has_a_sentence_and_every_key_values() -> None:
    assert len(KNOWN) > 200
    assert [key for key, each in KNOWN.items() if not each.sentence.endswith((".", ")"))] == []
    assert [key for key, each in KNOWN.items() if not each.is_section and not each.values] == []


def test_values_and_defaults_are_those_of_the_sections() -> None:
    assert KNOWN["algorithm.clip"][1:3] == ("number > 0", "0.2")
    assert KNOWN["algorithm.bound_ratio"].values == "number > 1"
    assert KNOWN["learner.lora.rank"][1:3] == ("integer > 0", "16")
    assert KNOWN["rollout.swap"].values == '"drain", "in_flight"'
    assert KNOWN["rollout.stop_tokens"][1:3] == ("list of integer or text", "[]")
    assert KNOWN["directory"].default == "required"
    assert KNOWN["learner.ema_decay"].default == ""


def test_the_page_is_what_the_command_prints() -> None:
    written = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert written == page(), "prefixrl config --markdown > docs/configuration.md"


def test_a_name_elsewhere_leads_to_a_key_that_exists() -> None:
    assert {key for key in SYNONYMS.values() if key not in KNOWN} == set()
    assert next(explained("num_generations")).startswith("algorithm.samples_per_prompt = ")
    assert next(explained("actor_lr")).startswith("learner.actor_lr = ")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        pytest.param(
            "kl_target",
            "kl_target: there is none, because the KL coefficient is constant",
            id="kl_target",
        ),
        pytest.param(
            "freezing_actor_steps", "algorithm.critic_warmup_steps = ", id="freezing_actor_steps"
        ),
        pytest.param("enable_ema", "learner.ema_decay = ", id="enable_ema"),
        pytest.param("l2", "learner.weight_decay = ", id="l2"),
        pytest.param("actor_rollout_ref.rollout.name", "rollout.engine = ", id="rollout.name"),
        pytest.param(
            "actor_rollout_ref.actor.ppo_epochs", "algorithm.ppo_epochs = ", id="ppo_epochs"
        ),
        pytest.param(
            "lora_dropout",
            "lora_dropout: there is none, because low-rank matrices have no dropout",
            id="lora_dropout",
        ),
        pytest.param(
            "load_in_4bit",
            "load_in_4bit: there is none, because the base of LoRA is not quantised",
            id="load_in_4bit",
        ),
    ],
)
def test_names_of_other_programs_have_no_nonsense_for_an_answer(name: str, answer: str) -> None:
    assert next(explained(name)).startswith(answer)
    with pytest.raises(ConfigError, match="`prefixrl config` lists the sections"):
        list(explained(f"{name}_of_nothing"))


def test_a_section_is_explained_with_its_keys() -> None:
    lines = list(explained("learner.lora"))
    assert lines[0].startswith("[learner.lora]")
    assert any(line.startswith("learner.lora.rank = integer > 0  (default: 16)") for line in lines)


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.klip: there is no such .*; did you mean algorithm\.clip"
    ):
        list(explained("algorithm.klip"))
    done = CliRunner().invoke(main, ["config", "nothing.like.it"])
    assert done.exit_code == 2 and "`prefixrl config` lists the sections" in done.output


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        pytest.param(
            "algorithm.eps_clip=0.1", "did you mean 'algorithm.clip'?", id="OpenRLHF's clip"
        ),
        pytest.param(
            "learner.learning_rate=1e-5",
            "did you mean 'learner.actor_lr'?",
            id="a learning rate for both models",
        ),
        pytest.param(
            "num_generations=4", "did you mean 'algorithm.samples_per_prompt'?", id="TRL's samples"
        ),
        pytest.param("learner.actor_rl=1e-5", "did you mean 'actor_lr'?", id="swapped letters"),
        pytest.param(
            "actor_lr=1e-5", "did you mean 'learner.actor_lr'?", id="a key without its section"
        ),
        pytest.param(
            "learner.kl=0.1", "did you mean 'algorithm.kl'?", id="a key of another section"
        ),
        pytest.param(
            "scorers=2", "did you mean 'launch.scorers'?", id="a count without its section"
        ),
        pytest.param("data.train=[{paths='x'}]", "did you mean 'path'?", id="a plural"),
        pytest.param(
            "temperature=0.5",
            "did you mean 'rollout.temperature' or 'scorer.temperature'?",
            id="a key of two sections",
        ),
    ],
)
def test_a_run_file_with_a_name_from_elsewhere_is_refused_with_ours(given: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_flags({}, (given,))
    assert hint in str(refused.value)


def test_the_schema_is_json(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["config", "--json-schema"])
    assert json.loads(done.output)["properties"]["algorithm"]


def test_explaining_needs_no_torch() -> None:
    program = (
        "import sys; from prefixrl.deploy.commands.config import page; page(); "
        "assert not {'torch', 'transformers', 'vllm', 'deepspeed'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
