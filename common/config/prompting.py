"""`[adapter]` and `[target]`: a model, and the form in which it is asked a question.

question ──▶ prompt_template (a worked example, an instruction) ──▶ user turn of the chat template, or the prompt itself
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from prefixrl.common.config.section import Section
from prefixrl.common.errors import ConfigError, to_copy

PROBLEM = "{problem}"
"""The question's place in a prompt template; `{question}` is taken for it."""
GGUF = "; a GGUF file must be converted: transformers reads it with gguf_file=…, and save_pretrained writes a folder"
"""Remedy behind a message about a model that is no folder with a config.json."""
ADVICE = "{prefix}"
"""The place of the advice in a template of the target."""
DRAFT = "{draft}"
"""The place of the target's draft in the prompt template of an adapter that reads it."""
ADVICE_TEMPLATE = f"{PROBLEM}\n\nAdvice, which may be wrong: {ADVICE}"
"""The target's prompt template with advice, where the run file has none."""
RESERVED = frozenset((
    "messages", "conversation", "chat_template", "tools", "documents", "add_generation_prompt", "tokenize",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
))  # fmt: skip
"""Variables of a chat template that are no option of it."""


class ModelConfig(Section):
    """A model, and how it is asked."""

    model: str
    """Folder with a Hugging Face model, or a hub name."""
    chat_template: Literal[False] | str | None = None
    """Absent: the model folder's own, if it has one. false: none, as for a base model. Else a Jinja file, or the
    template itself."""
    system: str | None = None
    """Text of a system turn before the question. Absent: none, but that of the template."""
    template_options: dict[str, bool | int | float | str] = Field(default={})
    """Variables of the chat template: { enable_thinking = false }."""
    prompt_template: str | None = None
    """Text around a question, for example worked examples before it, with {problem} in its place: a file (the newline
    at its end is left out), or the text itself. With a chat template it is the user turn, without one the prompt."""

    def _check_templates(self) -> None:
        if self.chat_template is False:
            reason = "there is no chat template that could use it"
            keys = ("system", "template_options")
            self.refuse_given(keys, "chat_template = false", reason)
        for key in ("chat_template", "prompt_template"):
            self.refuse_if(
                getattr(self, key) == "", key, "neither a file nor a template; leave it out"
            )
        reserved = sorted(RESERVED & self.template_options.keys())
        if reserved:
            raise ValueError(
                f"template_options sets {', '.join(reserved)}: this software sets them itself; leave it out"
            )


class TargetConfig(ModelConfig):
    """The frozen model that answers, and how it is asked."""

    placement: Literal["answer", "advice"] = "answer"
    """answer: the target continues the prefix as the beginning of its answer. advice: the prefix is a text in the
    question, at {prefix} in prompt_template or system, and the target answers from the beginning: for models of any
    family, and for chat endpoints."""
    bare_template: str | None = None
    """With advice: the prompt_template of a question without advice, a file or the text itself. Absent:
    prompt_template without the lines that have {prefix}."""

    @property
    def has_advice(self) -> bool:
        """True if the prefix stands in the question."""
        return self.placement == "advice"

    def _check_bare(self) -> None:
        if not self.has_advice and self.is_given("bare_template"):
            reason = "the target continues the prefix"
            raise ValueError(self.no_effect("bare_template", 'placement = "answer"', reason))


class AdapterConfig(ModelConfig):
    """The model that learns, and how it is asked."""

    sees: Literal["problem", "draft"] = "problem"
    """Text that the adapter reads. draft: the problem, and the target's greedy answer to it without advice, at {draft}
    in prompt_template; with target.placement = "advice" alone. Each problem is drafted once in a run."""
    init_from: str | None = None
    """A run (its newest checkpoint) or a checkpoint whose adapter and critic a new run begins with; `model` is what it
    was trained from. Optimisers, schedule, versions and the order of problems start from zero: nothing is resumed."""
    reference: Literal["start", "model"] = "start"
    """Reference of the KL. start: the weights that the run begins with. model: `model`, also where `init_from` gives
    the first weights, so that a continued run keeps its anchor."""

    @property
    def sees_draft(self) -> bool:
        """True if the target answers before the adapter writes."""
        return self.sees == "draft"

    @property
    def start(self) -> str:
        """The folder or hub name of the first weights, version 0."""
        return self.model if self.init_from is None else f"{self.init_from}/hf"


def checkpoint_of(name: str, base: Path, directory: Path) -> str:
    """Return the checkpoint folder that `adapter.init_from` names; ConfigError if it is none."""
    path = (base / os.path.expanduser(name)).resolve()
    checkpoint = max((path / "checkpoints").glob("step_????????"), default=path)
    if not (checkpoint / "hf").is_dir():
        raise ConfigError(
            f"adapter.init_from = {name!r}: {path} is neither a run with a checkpoint nor a checkpoint (a folder with "
            f"hf in it); for weights without one give adapter.model"
        )
    if checkpoint.is_relative_to(directory.resolve()):
        raise ConfigError(
            f"adapter.init_from = {name!r} lies in the run's own directory {directory}: to begin with it is to begin "
            f"anew; choose another directory, or go on with {to_copy('prefixrl resume', directory)}"
        )
    return str(checkpoint)
