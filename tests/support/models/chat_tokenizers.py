"""Small real tokenizers with chat templates like Qwen2.5's and Llama-3's, trained on a few lines of text."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN_TEMPLATE = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
{%- for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA_TEMPLATE = """\
{{- '<|begin_of_text|>' }}
{%- for turn in messages %}{{ '<|start_header_id|>' + turn.role + '<|end_header_id|>\\n\\n' }}
{{- turn.content.strip() + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

LINES = (
    "What is the sum of two numbers? Think step by step, and write the final answer in \\boxed{}.",
)


def qwen(folder: Path) -> Path:
    """A model folder without a model; a turn reads `<|im_start|>role … <|im_end|>`."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _save(folder, QWEN_TEMPLATE, special, "<|im_end|>", LINES)


def llama(folder: Path, lines: Iterable[str] = LINES) -> Path:
    """A model folder without a model; a turn reads `<|start_header_id|>role<|end_header_id|> … <|eot_id|>`."""
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return _save(folder, LLAMA_TEMPLATE, special, "<|eot_id|>", lines)


def _save(folder: Path, template: str, special: list[str], eos: str, lines: Iterable[str]) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        additional_special_tokens=special,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder
