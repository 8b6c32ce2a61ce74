"""One run of TRL's GRPOTrainer on the arithmetic example, started by `trl_peer.py` in an environment of TRL.

It imports nothing of the product. A line per step goes to the file: seconds since the first step began, the clock then,
mean reward."""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def target_reward(folder: Path, most_tokens: int, temperature: float) -> Any:
    """The reward function: the target continues every prefix in one batched `generate`; 1 where its box is right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")

    @torch.inference_mode()
    def reward(prompts: Any, completion_ids: Any, answer: list[str], **_: Any) -> list[float]:
        # Adapter and target of the example share their tokenizer and its template.
        begun = [
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            + [token for token in ids if token != tokenizer.eos_token_id]
            for prompt, ids in zip(prompts, completion_ids, strict=True)
        ]
        padded = tokenizer.pad({"input_ids": begun}, return_tensors="pt")
        written = model.generate(
            **padded,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=most_tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(written[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
        boxes = [BOX.findall(text) for text in texts]
        return [float(bool(found) and found[-1].strip() == gold) for found, gold in zip(boxes, answer, strict=True)]

    return reward


def trainer_of(arguments: argparse.Namespace, note: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    run = json.loads(arguments.settings)
    example = Path(run["example"])
    lines = [json.loads(line) for line in (example / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": [{"role": "user", "content": line["question"]}], "answer": line["answer"]} for line in lines]
    config = GRPOConfig(
        output_dir=str(arguments.out.with_suffix(".trl")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=run["rows"],
        num_generations=run["samples"],
        max_completion_length=run["prefix_tokens"],
        temperature=run["temperature"],
        learning_rate=run["actor_lr"],
        lr_scheduler_type="constant",
        adam_beta1=run["betas"][0],
        adam_beta2=run["betas"][1],
        weight_decay=run["weight_decay"],
        max_grad_norm=run["grad_clip"],
        beta=0.0,
        max_steps=run["steps"],
        seed=arguments.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_vllm=False,
    )

    class Watch(TrainerCallback):
        started_s = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started_s = time.monotonic()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs.get("logs") or {}
            if "reward" in logs:
                control.should_training_stop |= note(time.monotonic() - self.started_s, float(logs["reward"]))

    model = AutoModelForCausalLM.from_pretrained(example / "adapter", dtype=torch.float32)
    reward = target_reward(example / "target", run["most_tokens"], run["target_temperature"])
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(example / "adapter", padding_side="left"),
        callbacks=[Watch()],
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", required=True, help="JSON, of `trl_peer.Task`.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    import torch

    torch.set_num_threads(arguments.threads)
    run: dict[str, Any] = json.loads(arguments.settings)
    span, goal, rewards = int(run["span"]), float(run["goal"]), list[float]()
    with arguments.out.open("w", encoding="utf-8") as file:

        def note(seconds: float, reward: float) -> bool:
            rewards.append(reward)
            file.write(json.dumps({"seconds": seconds, "clock_s": time.time(), "reward": reward}) + "\n")
            file.flush()
            return len(rewards) >= span and sum(rewards[-span:]) / span >= goal

        trainer_of(arguments, note).train()


if __name__ == "__main__":
    main()
