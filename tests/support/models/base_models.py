"""The example's models as base models: the chat template closes turns by a token that is no eos, as in Qwen2.5's."""

import json
import shutil
from pathlib import Path
from typing import Any

from prefixrl.common.config.load import load
from prefixrl.common.config.run import RunConfig
from prefixrl.common.engines.interface.base import Engine
from prefixrl.common.prompts.rendering import Renderer, renderer_of
from prefixrl.common.wire.messages.groups import Prompt, ScoredGroup, Verdict
from prefixrl.common.wire.messages.worker import ModelDigests, Scores, ScoreTask
from prefixrl.scorer.loop import Scorer
from prefixrl.scorer.verifier.pool import VerifierPool
from support.broker.scoring_world import Tasks
from support.messages import group, row, score_task
from support.paths import EXAMPLE

CLOSER, EOS = 1, 0
"""Ids of `<|im_end|>`, with which the models were taught to end an answer, and of `<|endoftext|>`."""
AS_DECLARED = ("scorer.own_stops=false", 'scorer.stop_tokens=["<|endoftext|>"]')
"""Stops that the tokenizer and the configs of a base model declare, and no others."""
OPENING = "Let us add them up:"
_NAMES = {"<|end|>": "<|im_end|>", "<|pad|>": "<|endoftext|>"}
_TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def base_model(source: Path, folder: Path) -> Path:
    """Copy a model of the arithmetic example; what it computes stays the same."""
    shutil.copytree(source, folder)
    for name in _TEXTS:
        text = (folder / name).read_text(encoding="utf-8")
        for old, new in _NAMES.items():
            text = text.replace(old, new)
        (folder / name).write_text(text, encoding="utf-8")
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit(folder / "config.json", eos_token_id=EOS)
    edit(folder / "generation_config.json", eos_token_id=EOS)
    return folder


def endless_target(folder: Path) -> Path:
    """The example's target, which writes an empty line behind its answer and then an invented turn."""
    target = base_model(EXAMPLE / "target", folder)
    for name in ("tokenizer.json", "chat_template.jinja"):
        path = target / name
        text = path.read_text(encoding="utf-8")
        text = text.replace("<|im_end|>", "\\n\\n" if name.endswith("json") else "")
        path.write_text(text, encoding="utf-8")
    tokens = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    for token in tokens:
        token["special"] = token["id"] != CLOSER
    edit(target / "tokenizer.json", added_tokens=tokens)
    return target


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(document), encoding="utf-8")


def run_of(target: Path, *settings: str) -> RunConfig:
    """The example's run with a base model as target, which keeps its texts and is greedy."""
    usual = (f"target.model={target}", "scorer.keep_completions=true", "scorer.temperature=0.0")
    return load(EXAMPLE / "run.toml", (*usual, *settings))


def task(config: RunConfig, renderer: Renderer, opening: str, problems: int = 6) -> ScoreTask:
    """Problems of the example with the same opening each."""
    lines = (EXAMPLE / "train.jsonl").read_text(encoding="utf-8").splitlines()[:problems]
    groups = []
    for seq, line in enumerate(lines):
        problem = json.loads(line)
        prompt = Prompt(str(seq), problem["question"], str(problem["answer"]))
        prefix = row(renderer.encode(opening), version=None)
        groups.append(group(seq, prefix, prompt=prompt, seed=seq))
    return score_task(*groups, sampling=config.scorer_sampling())


def judged(config: RunConfig, engine: Engine, opening: str = OPENING) -> list[Verdict]:
    """Verdicts of a real scorer over an engine of the target."""
    return [verdict for group in scored(config, engine, opening) for verdict in group.verdicts]


def scored(config: RunConfig, engine: Engine, opening: str) -> tuple[ScoredGroup, ...]:
    """Groups of a row each, as a real scorer sends them."""
    renderer, pool = renderer_of(config, "scorer"), VerifierPool(1, 5)
    link = Tasks(task(config, renderer, opening))
    try:
        Scorer(config, link, engine, renderer, pool, ModelDigests("", "", "")).run(lambda: False)  # type: ignore[arg-type]
    finally:
        pool.close()
    (scores,) = link.sent
    assert isinstance(scores, Scores)
    return scores.groups


def check_ends(verdicts: list[Verdict]) -> None:
    """Every text ends with its one answer."""
    assert verdicts
    for verdict in verdicts:
        assert verdict.finish == "eos" and verdict.status == "ok", verdict
        assert verdict.completion.endswith("}") and verdict.completion.count("boxed") == 1, (
            verdict.completion
        )
        assert 0 < verdict.completion_tokens < 20
