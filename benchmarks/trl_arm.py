"""One run of TRL's GRPOTrainer on an example, started by `trl_peer.py` in an environment of TRL.

It imports nothing of the product. A line per step goes to the file: seconds since the first step began, the clock then,
mean reward."""

import argparse
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

BOX = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Continued:
    """A frozen target, and whether its answers are right."""

    def __init__(self, run: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._run, dtype = run, getattr(torch, run["dtype"])
        self._model: Any = None
        if not run["target_url"]:
            self._model = AutoModelForCausalLM.from_pretrained(run["target"], dtype=dtype).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(run["target"], padding_side="left")
        self._ends = {self._tokenizer.eos_token_id, *map(self._id_of, run["stop"])}

    def _id_of(self, text: str) -> int:
        (token,) = self._tokenizer.encode(text, add_special_tokens=False)
        return int(token)

    def asked(self, prompt: Any) -> list[int]:
        """The ids of a prompt: a chat, or plain text."""
        if isinstance(prompt, str):
            return list(self._tokenizer.encode(prompt))
        return list(
            self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=False
            )
        )

    def reward(
        self, prompts: Any, completion_ids: Any, answer: list[str], temperature: float, **_: Any
    ) -> list[float]:
        """1 for each right answer. The target continues the prefixes that do not end the answer, all at once."""
        texts = [self._tokenizer.decode(ids) for ids in completion_ids]
        # Adapter and target of an example share their tokenizer and its template.
        begun = {
            row: self.asked(prompts[row]) + [token for token in ids if token not in self._ends]
            for row, ids in enumerate(completion_ids)
            if self._run["stop"] == [] or not self._ends & set(ids)
        }
        if begun:
            write = self._served if self._run["target_url"] else self._written
            written = write(list(begun.values()), temperature)
            for row, text in zip(begun, written, strict=True):
                texts[row] += text
        judge = boxed if self._run["prompt_template"] is None else last_number
        return [judge(text, gold) for text, gold in zip(texts, answer, strict=True)]

    def _written(self, begun: list[list[int]], temperature: float) -> list[str]:
        import torch

        padded = self._tokenizer.pad({"input_ids": begun}, return_tensors="pt")
        drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with torch.inference_mode():
            written = self._model.generate(
                **padded,
                **(drawn if temperature else {"do_sample": False}),
                eos_token_id=sorted(self._ends),
                max_new_tokens=self._run["most_tokens"],
                pad_token_id=self._tokenizer.pad_token_id,
            )
        found: list[str] = self._tokenizer.batch_decode(
            written[:, padded["input_ids"].shape[1] :], True
        )
        return found

    def _served(self, begun: list[list[int]], temperature: float) -> list[str]:
        asked = {
            "model": self._run["target"],
            "prompt": begun,
            "temperature": temperature,
            "stop_token_ids": sorted(self._ends),
            "max_tokens": self._run["most_tokens"],
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            self._run["target_url"], json.dumps(asked).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return [str(each["text"]) for each in json.load(answer)["choices"]]


def boxed(text: str, gold: str) -> float:
    """1 where the last box holds the gold."""
    found = BOX.findall(text)
    return float(bool(found) and found[-1].strip() == gold)


def last_number(text: str, gold: str) -> float:
    """1 where the last number of the first line is the gold."""
    found = NUMBER.findall(text.lstrip().partition("\n")[0].replace(",", ""))
    return float(bool(found) and float(found[-1]) == float(gold))


def problems(run: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Rows as TRL reads them: a chat, or text where the example has a template."""
    lines = (Path(run["example"]) / name).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    form = run["prompt_template"]
    return [
        {
            "prompt": form.replace("{problem}", row["question"])
            if form
            else [{"role": "user", "content": row["question"]}],
            "answer": row["answer"],
        }
        for row in rows
    ]


def trainer_of(
    arguments: argparse.Namespace, run: dict[str, Any], target: Continued, note: Any
) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(arguments.out.with_suffix(".trl")),
        use_cpu=True,
        bf16=run["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=run["rows_at_once"],
        gradient_accumulation_steps=run["rows"]
        // run["rows_at_once"],  # all rows are written before the first
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
                control.should_training_stop |= note(
                    time.monotonic() - self.started_s, float(logs["reward"])
                )

    model = AutoModelForCausalLM.from_pretrained(run["adapter"], dtype=getattr(torch, run["dtype"]))
    tokenizer = AutoTokenizer.from_pretrained(run["adapter"], padding_side="left")
    if run[
        "stop"
    ]:  # TRL masks what follows the EOS, so the token that ends an answer takes its place
        (tokenizer.eos_token,) = tokenizer.tokenize(run["stop"][0])
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    lora = None
    if run["lora_rank"]:
        from peft import LoraConfig

        lora = LoraConfig(
            r=run["lora_rank"], lora_alpha=run["lora_alpha"], target_modules="all-linear"
        )

    def reward(prompts: Any, completion_ids: Any, answer: list[str], **_: Any) -> list[float]:
        return target.reward(prompts, completion_ids, answer, run["target_temperature"])

    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(problems(run, "train.jsonl")),
        processing_class=tokenizer,
        callbacks=[Watch()],
        peft_config=lora,
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
            file.write(
                json.dumps({"seconds": seconds, "clock_s": time.time(), "reward": reward}) + "\n"
            )
            file.flush()
            return len(rewards) >= span and sum(rewards[-span:]) / span >= goal

        target = Continued(run)
        trainer_of(arguments, run, target, note).train()


if __name__ == "__main__":
    main()
