"""All keys of the run file with values, defaults and sentences, from the sections. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prefixrl.common.config.run import RunConfig
from prefixrl.common.config.section import toml

SYNONYMS: Mapping[str, str] = {
    name: key
    for key, names in {
        "adapter.model": "pretrain model_name_or_path actor_model policy_model model_path",
        "target.model": "target_model judge_model",
        "directory": "output_dir save_path ckpt_path default_local_dir log_dir run_dir",
        "data.train": "dataset dataset_name train_files prompt_data train_dataset",
        "data.eval": "val_files eval_dataset test_files",
        "data.epochs": "num_train_epochs total_epochs num_episodes epochs",
        "rollout.prefix_tokens": "max_completion_length response_length generate_max_len max_response_length k",
        "rollout.max_prompt_tokens": "prompt_max_len max_prompt_length prompt_length",
        "rollout.temperature": "sampling_temperature",
        "rollout.vllm.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size tp_size",
        "algorithm.name": "adv_estimator advantage_estimator algo loss_type",
        "algorithm.groups_per_iteration": "train_batch_size rollout_batch_size batch_size",
        "algorithm.samples_per_prompt": "n n_samples_per_prompt num_generations num_return_sequences rollout_n",
        "algorithm.minibatches": "ppo_mini_batch_size num_mini_batches mini_batch_size",
        "algorithm.ppo_epochs": "max_epochs num_ppo_epochs num_iterations",
        "algorithm.iterations": "max_steps total_training_steps num_steps steps",
        "algorithm.max_staleness": "async_level max_async_level staleness off_policy_steps",
        "algorithm.clip": "eps_clip cliprange clip_ratio epsilon clip_range",
        "algorithm.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
        "algorithm.value_clip": "cliprange_value value_clip_range",
        "algorithm.gae_lambda": "lam lambd gae_lam",
        "algorithm.kl": "beta init_kl_coef kl_coef kl_loss_coef kl_penalty",
        "algorithm.kl_placement": "use_kl_loss use_kl_in_reward",
        "algorithm.entropy": "entropy_coeff entropy_coef entropy_loss_coef",
        "filter.accuracy": "filter_groups dynamic_filtering filter_accuracy",
        "learner.actor_lr": "lr learning_rate actor_learning_rate",
        "learner.critic_lr": "critic_learning_rate value_lr",
        "learner.warmup_ratio": "lr_warmup_ratio lr_warmup_steps_ratio",
        "learner.grad_clip": "max_grad_norm max_norm",
        "learner.micro_batch_tokens": "micro_train_batch_size per_device_train_batch_size ppo_max_token_len_per_gpu",
        "learner.dtype": "bf16 torch_dtype precision fp16",
        "learner.packed": "packing_samples use_remove_padding padding_free",
        "learner.gradient_checkpointing": "enable_gradient_checkpointing",
        "learner.deepspeed": "zero_stage zpg adam_offload",
        "learner.lora.rank": "lora_rank lora_r",
        "checkpoint.every": "save_steps save_freq save_interval",
        "checkpoint.keep": "save_total_limit max_ckpt_num",
        "evaluation.every": "eval_steps test_freq eval_freq",
        "launch.rollouts": "vllm_num_engines num_engines",
        "reward.function": "reward_fn reward_func reward_funcs custom_reward_function",
        "scorer.max_new_tokens": "target_max_len",
        "scorer.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    }.items()
    for name in names.split()
}
"""Names of the same settings elsewhere (TRL, verl, OpenRLHF, prime-rl), for the hint at an unknown key."""


class Setting(NamedTuple):
    """One key, or a section."""

    key: str
    """With its sections: `learner.lora.rank`."""
    values: str
    """The values it takes; "" for a section."""
    default: str
    """As TOML writes it; `required`, or "" for a key that may be absent."""
    sentence: str

    @property
    def is_section(self) -> bool:
        """True for a table of the run file."""
        return not self.values


def settings() -> tuple[Setting, ...]:
    """Return all keys in the order of the run file, each section before its keys."""
    schema = json_schema()
    return tuple(_walk(schema, schema["$defs"], ""))


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the run file."""
    return RunConfig.model_json_schema()


def _walk(node: dict[str, Any], definitions: dict[str, Any], path: str) -> Iterator[Setting]:
    required = node.get("required", ())
    for name, field in node["properties"].items():
        key, section = f"{path}{name}", _section(field, definitions)
        sentence = field.get("description") or (section or {}).get("description", "")
        if section is None:
            values = ", ".join(dict.fromkeys(_values(field, definitions)))
            default = "" if field.get("default") is None else toml(field["default"])
            default = "required" if name in required else default
            yield Setting(key, values, default, " ".join(sentence.split()))
        else:
            yield Setting(key, "", "", " ".join(sentence.split()))
            yield from _walk(section, definitions, f"{key}.")


def _section(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any] | None:
    for each in (field, *field.get("anyOf", ())):
        found = definitions.get(each.get("$ref", "").rsplit("/", 1)[-1], {})
        if "properties" in found:
            section: dict[str, Any] = found
            return section
    return None


def _values(field: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """Yield each kind of value; absent ones (null) are no value."""
    if "$ref" in field:
        field = definitions[field["$ref"].rsplit("/", 1)[-1]]
    if "anyOf" in field:
        for each in field["anyOf"]:
            yield from _values(each, definitions)
    elif "const" in field:
        yield toml(field["const"])
    elif "enum" in field:
        yield from map(toml, field["enum"])
    elif field.get("type") == "array":
        items = field.get("items") or (field.get("prefixItems") or [{}])[0]
        yield f"list of {' or '.join(_values(items, definitions)) or 'values'}"
    elif field.get("type") == "object":
        yield "table"
    elif field.get("type") in _KINDS:
        bounds = " and ".join(f"{sign} {field[name]:g}" for name, sign in _BOUNDS.items() if name in field)
        yield f"{_KINDS[field['type']]} {bounds}".rstrip()


_KINDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true, false"}
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
