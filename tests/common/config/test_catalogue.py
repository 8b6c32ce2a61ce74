"""Every key of the run file is explained, in the commands and on the page, and found by its names elsewhere."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from prefixrl.common.config.catalogue import ABSENT, SYNONYMS, settings
from prefixrl.common.config.load import from_flags
from prefixrl.common.errors import ConfigError
from prefixrl.deploy.__main__ import main
from prefixrl.deploy.commands.config import explained, page
from support.paths import ROOT
from support.tables import table

KNOWN = {each.key: each for each in settings()}
LAST = {key.rsplit(".", 1)[-1] for key in KNOWN}


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


FLAGS = tomllib.loads(Path(__file__).with_name("flags.toml").read_text())


@pytest.mark.parametrize("program", FLAGS)
def test_every_flag_of_another_program_is_answered_by_a_key_or_a_reason(program: str) -> None:
    names = FLAGS[program].split()
    answers = {name: next(explained(name)) for name in names}
    assert len(names) > 60
    assert [
        name
        for name in names
        if not (SYNONYMS.keys() | ABSENT.keys() | LAST) & {name, name.rsplit(".", 1)[-1]}
    ] == []
    assert all(
        answers[name].startswith(f"{name}: there is none, because ")
        for name in names
        if name in ABSENT.keys() - LAST
    )
    assert SYNONYMS.keys().isdisjoint(ABSENT)


@table(__file__)
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


@table(__file__)
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
