"""LoRA training in TRL, as its users write it: `SFTTrainer`, `DPOTrainer`, or `GRPOTrainer` on sums that a function
checks.

    PYTHON trl_loop.py SETTINGS

A program of another environment, with `trl` and `peft`: it imports nothing of this project. SETTINGS is a JSON file
that `beside_trl.py` writes. Prints a JSON object with the key "step" for each step, and others for the start, the
held-out problems and the end.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()


def say(**numbers: Any) -> None:
    """Print a line for the process that started this one."""
    print(json.dumps(numbers), flush=True)


def sum_reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """What `examples/rl_sums.py` gives: 1 for the sum, 0.1 for another number, 0 without one."""
    texts = [completion.strip() for completion in completions]
    return [
        1.0 if text == right else 0.1 if text.isdecimal() else 0.0 for text, right in zip(texts, answer, strict=True)
    ]


def common(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments of both trainers. Everything that is not here or below is TRL's default."""
    on_cpu = settings["device"] == "cpu"
    return {
        "output_dir": str(Path(settings["folder"]) / "trl"),
        "per_device_train_batch_size": settings["batch"],
        "max_steps": settings["steps"],
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta1": settings["beta1"],
        "adam_beta2": settings["beta2"],
        "adam_epsilon": settings["eps"],
        "weight_decay": 0.0,
        "max_grad_norm": settings["clip"],
        "seed": settings["seed"],
        "gradient_checkpointing": settings["checkpointing"],
        "bf16": not on_cpu,
        "use_cpu": on_cpu,
        "model_init_kwargs": {"dtype": "float32" if on_cpu else "bfloat16"},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def lora(settings: dict[str, Any]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        target_modules=settings["targets"],
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def callback(losses: list[float], further: Any) -> Any:
    """Prints a line for each step, when its update is done and logged; `further`: numbers of a log, by their name
    here."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.last = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "grad_norm" not in logs:
                return  # the summary at the end
            now = time.perf_counter()
            numbers = {name: logs[key] for name, key in further.items()}
            say(
                step=state.global_step,
                loss=losses[-1],
                grad_norm=float(logs["grad_norm"]),
                **numbers,
                s=now - self.last,
            )
            self.last = now

    return Steps()


def sft(settings: dict[str, Any]) -> None:
    from datasets import Dataset  # type: ignore[import-untyped]
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    losses: list[float] = []
    seen = hashlib.sha256()

    class Watched(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            """Also keep the loss with all digits, and which tokens were trained on."""
            for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
                length = int(mask.sum())
                seen.update(json.dumps([ids[:length].tolist(), labels[:length].tolist()]).encode())
            loss = super().compute_loss(model, inputs, *arguments, **named)
            losses.append(loss.item())
            return loss

    trainer = Watched(
        settings["model"],
        args=SFTConfig(**common(settings), train_sampling_strategy="sequential"),
        train_dataset=Dataset.from_list(settings["examples"]),
        peft_config=lora(settings),
        callbacks=[callback(losses, {})],
    )
    save_first(trainer, settings)
    measured_training(trainer, settings)
    say(sha256=seen.hexdigest(), total_s=time.perf_counter() - BEGAN)


def dpo(settings: dict[str, Any]) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []
    seen = hashlib.sha256()

    class Watched(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            """The pairs are token ids already."""
            return dataset

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            """Also keep the loss with all digits, and which tokens were trained on: chosen, rejected, chosen, ..."""
            if not self.model.training:
                return super().compute_loss(model, inputs, *arguments, **named)
            labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
            pairs = len(labels) // 2
            for place in (half + pair for pair in range(pairs) for half in (0, pairs)):
                length = int(inputs["attention_mask"][place].sum())
                row = [inputs["input_ids"][place][:length].tolist(), labels[place][:length].tolist()]
                seen.update(json.dumps(row).encode())
            loss = super().compute_loss(model, inputs, *arguments, **named)
            losses.append(loss.item())
            return loss

    config = DPOConfig(
        **common(settings),
        beta=settings["dpo_beta"],
        precompute_ref_log_probs=True,  # once, as the other side does
        train_sampling_strategy="sequential",
        per_device_eval_batch_size=settings["batch"],
    )
    trainer = Watched(
        settings["model"],
        args=config,
        train_dataset=Dataset.from_list(settings["examples"]),
        eval_dataset=Dataset.from_list(settings["kept"]),
        peft_config=lora(settings),
        callbacks=[callback(losses, {"accuracy": "rewards/accuracies", "margin": "rewards/margins"})],
    )
    save_first(trainer, settings)
    measured_training(trainer, settings)
    say(sha256=seen.hexdigest(), total_s=time.perf_counter() - BEGAN)


def measured_training(trainer: Any, settings: dict[str, Any]) -> None:
    """Train; where there are held-out prompts, answer them before and after."""
    if "asked" not in settings:
        trainer.train()
        return
    answered(trainer, settings, step=0)
    trainer.train()
    answered(trainer, settings, step=settings["steps"])


def grpo(settings: dict[str, Any]) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    losses: list[float] = []
    rollouts: list[dict[str, Any]] = []

    class Watched(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            """Also keep what was sampled, so that another trainer can train on the same."""
            loss = super().compute_loss(model, inputs, *arguments, **named)
            losses.append(loss.item())
            rollouts.append(rows(inputs))
            return loss

    config = GRPOConfig(
        **common(settings),
        num_generations=settings["group"],
        max_completion_length=settings["max_tokens"],
        temperature=settings["temperature"],
        beta=0.0,
        epsilon=settings["epsilon"],
        loss_type="dapo",  # the sum over all tokens of the batch, over their number
        scale_rewards="group",
        shuffle_dataset=False,
        use_vllm=False,  # transformers samples: TRL's default
    )
    model = AutoModelForCausalLM.from_pretrained(settings["model"], **config.model_init_kwargs)
    model.generation_config.eos_token_id = settings["stop"]
    config.model_init_kwargs = None
    learned = [{"prompt": each["text"], "answer": each["answer"]} for each in settings["learned"]]
    trainer = Watched(
        model,
        reward_funcs=sum_reward,
        args=config,
        train_dataset=Dataset.from_list(learned),
        peft_config=lora(settings),
        callbacks=[callback(losses, {"reward": "reward", "tokens": "completions/mean_length"})],
    )
    if sorted(trainer.eos_token_ids) != settings["stop"]:
        raise SystemExit(f"TRL stops at {trainer.eos_token_ids}, not at {settings['stop']}")
    for each in [*settings["learned"], *settings["held_out"]]:
        if trainer.processing_class(text=each["text"])["input_ids"] != each["ids"]:
            raise SystemExit(f"TRL reads {each['text']!r} as other tokens")
    save_first(trainer, settings)
    held_out(trainer, settings, step=0)
    trainer.train()
    held_out(trainer, settings, step=settings["steps"])
    (Path(settings["folder"]) / "rollouts.json").write_text(json.dumps(rollouts))
    say(total_s=time.perf_counter() - BEGAN)


def rows(inputs: Any) -> dict[str, Any]:
    """The sequences of one step without padding: tokens of the prompt, those sampled, and each one's advantage."""
    return {
        "prompts": [
            ids[mask.bool()].tolist() for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        ],
        "sampled": [
            ids[mask.bool()].tolist()
            for ids, mask in zip(inputs["completion_ids"], inputs["completion_mask"], strict=True)
        ],
        "advantages": inputs["advantages"].tolist(),
    }


def held_out(trainer: Any, settings: dict[str, Any], step: int) -> None:
    """The share of right answers at temperature 0."""
    begin = time.perf_counter()
    tokenizer = trainer.processing_class
    batch = tokenizer(
        [each["text"] for each in settings["held_out"]], return_tensors="pt", padding=True, padding_side="left"
    )
    texts = tokenizer.batch_decode(greedy(trainer.model, batch, settings), skip_special_tokens=True)
    rewards = sum_reward(texts, [each["answer"] for each in settings["held_out"]])
    say(held_out=step, right=rewards.count(1.0), of=len(rewards), s=time.perf_counter() - begin)


def answered(trainer: Any, settings: dict[str, Any], step: int) -> None:
    """Replies to the held-out prompts at temperature 0, each beside the right answer; and of held-out pairs the loss,
    the share whose chosen answer gained more, and by how much."""
    begin = time.perf_counter()
    measured = trainer.evaluate() if settings["task"] == "dpo" else {}
    names = {"loss": "eval_loss", "accuracy": "eval_rewards/accuracies", "margin": "eval_rewards/margins"}
    asked = settings["asked"]
    tokenizer = trainer.processing_class
    batch = tokenizer.pad({"input_ids": asked}, padding_side="left", return_tensors="pt")
    out = greedy(trainer.model, batch, settings)
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    say(
        held_out=step,
        replies=[list(pair) for pair in zip(settings["answers"], texts, strict=True)],
        **{name: measured[key] for name, key in names.items() if key in measured},
        s=time.perf_counter() - begin,
    )


def greedy(model: Any, batch: Any, settings: dict[str, Any]) -> Any:
    """Token ids that the model gives at temperature 0, without those of the prompts; it is in training after that."""
    import torch

    model.eval()
    with torch.no_grad():
        out = model.generate(
            **batch.to(model.device),
            max_new_tokens=settings["max_tokens"],
            do_sample=False,
            eos_token_id=settings["stop"],
        )
    model.train()
    return out[:, batch["input_ids"].shape[1] :]


def save_first(trainer: Any, settings: dict[str, Any]) -> None:
    """The adapter before training; the start ends here."""
    say(start_s=time.perf_counter() - BEGAN)
    trainer.model.save_pretrained(Path(settings["folder"]) / "first")


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    {"sft": sft, "rows": sft, "dpo": dpo, "grpo": grpo}[settings["task"]](settings)


if __name__ == "__main__":
    main()
