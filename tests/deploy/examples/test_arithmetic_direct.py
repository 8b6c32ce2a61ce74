"""The direct arithmetic example.

Its start is built the same way every time, can do every procedure, and is mostly wrong.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefixrl.common.config.load import load
from prefixrl.deploy.examples.arithmetic import problems
from prefixrl.deploy.examples.arithmetic.build import right_by_family
from prefixrl.deploy.examples.arithmetic_direct import build

SHIPPED = Path(build.__file__).parent
RUN_FILE = SHIPPED / "run.toml"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def rebuild(out: Path) -> dict[str, torch.Tensor]:
    subprocess.run(
        [sys.executable, str(SHIPPED / "build.py"), "--out", str(out), "--steps", "2"],
        check=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return load_file(out / "policy/model.safetensors")


@pytest.mark.nightly
def test_the_build_is_repeatable_and_makes_a_model_of_the_shipped_shape(tmp_path: Path) -> None:
    first, second = rebuild(tmp_path / "a"), rebuild(tmp_path / "b")
    shipped = load_file(SHIPPED / "policy/model.safetensors")
    assert {name: tensor.shape for name, tensor in first.items()} == {
        name: tensor.shape for name, tensor in shipped.items()
    }
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "a/policy" / name).read_bytes() == (
            SHIPPED / "policy" / name
        ).read_bytes()


def test_the_weights_are_small() -> None:
    assert (SHIPPED / "policy/model.safetensors").stat().st_size < 4 * 2**20


def test_the_run_file_shares_the_problems_of_the_prefix_example() -> None:
    config = load(RUN_FILE)
    assert (config.mode, config.target) == ("direct", None)
    assert config.data.train[0].path is not None
    assert Path(config.data.train[0].path).parent == SHIPPED.parent / "arithmetic"
    assert len(build.read_problems("heldout.jsonl")) == problems.HELDOUT_ROWS


def test_the_start_is_below_60_percent_although_it_can_do_every_procedure() -> None:
    policy = AutoModelForCausalLM.from_pretrained(SHIPPED / "policy")
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "policy")
    held_out = build.read_problems("heldout.jsonl")[:256]
    nothing: list[list[int]] = [[] for _ in held_out]
    alone = right_by_family(policy, tokenizer, held_out, nothing, 0.0)
    assert 0.1 <= sum(alone) / len(alone) < 0.6
    openings = [
        tokenizer.encode(problem.family.opening, add_special_tokens=False) for problem in held_out
    ]
    assert min(right_by_family(policy, tokenizer, held_out, openings, 0.0)) >= 0.97
