"""`tinker-local train` on rows, watched: the half of `baselines/trl_loop.py` that is this project's command.

`python -m measurements.beside_train SETTINGS URL` runs the command in this process, as a user would write it, on the
server at URL. What the command hands to the SDK is hashed on its way: token ids, and as labels those with a weight,
in the form of TRL's. Prints the lines that `trl_loop.py` prints.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGAN = time.perf_counter()


def say(**numbers: Any) -> None:
    """Print a line for the process that started this one."""
    print(json.dumps(numbers), flush=True)


def labelled(datum: Any) -> list[list[int]]:
    """Token ids of a datum, and labels: -100 for each token that is not trained. ValueError if a target is not the
    token that follows."""
    inputs = {name: value.to_numpy().tolist() for name, value in datum.loss_fn_inputs.items()}
    targets = [int(target) for target in inputs["target_tokens"]]
    tokens = [*datum.model_input.to_ints(), targets[-1]]
    if tokens[1:] != targets:
        raise ValueError("a target is not the token that follows")
    labels = [target if weight else -100 for target, weight in zip(targets, inputs["weights"], strict=True)]
    return [tokens, [-100, *labels]]


class Watched:
    """Hashes what the SDK's training clients of this process are given to train on, in order."""

    def __init__(self) -> None:
        import tinker

        self.seen = hashlib.sha256()
        self.started = False
        for name in ("forward", "forward_backward", "forward_backward_custom"):
            setattr(tinker.TrainingClient, name, self._watched(getattr(tinker.TrainingClient, name), name != "forward"))

    def _watched(self, method: Any, trains: bool) -> Any:
        def call(client: Any, data: list[Any], *arguments: Any, **named: Any) -> Any:
            if not self.started:  # whatever is measured or trained first: the start ends here
                self.started = True
                say(start_s=time.perf_counter() - BEGAN)
            for datum in data if trains else ():
                self.seen.update(json.dumps(labelled(datum)).encode())
            return method(client, data, *arguments, **named)

        return call


def first_adapter(settings: Mapping[str, Any], url: str) -> str:
    """A checkpoint of a new adapter on what TRL's is on: the command alone would train the head, too, and its seed
    would change the order of rows."""
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    client = service.create_lora_training_client(
        base_model=settings["name"], rank=settings["rank"], seed=settings["seed"], train_unembed=False
    ).result()
    return client.save_state("first").result().path


def command(settings: Mapping[str, Any], url: str, state: str) -> list[str]:
    """The words behind `tinker-local`. Its `--seed` is that of the order of rows, the same for all jobs."""
    judge = Path(__file__).with_name("judge_replies.py")
    options = {
        "--model": settings["name"],
        "--url": url,
        "--out": f"{settings['folder']}/run",
        "--start-from": state,
        "--eval": f"{judge}:keep",
        "--epochs": 1,
        "--seed": 0,
        "--batch-size": settings["batch"],
        "--learning-rate": settings["learning_rate"],
        "--warmup": 0,
        "--shape": "constant",
        "--clip": settings["clip"],
        "--held-out": settings["held_out"],
        "--evaluate-every": 0,
        "--save-every": 0,
        "--answer-tokens": settings["max_tokens"],
        "--answer-rows": settings["held_out"],
        **{f"--{name}": settings[name] for name in ("beta1", "beta2", "eps")},
        **({"--dpo-beta": settings["dpo_beta"]} if "dpo_beta" in settings else {}),
    }
    return ["train", settings["rows"], *(str(word) for option in options.items() for word in option)]


def told(metrics: Sequence[Mapping[str, Any]], replies: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Lines about steps and held-out rows. `metrics`: of the run's folder; `replies`: of the evaluations, in order."""
    lines = []
    measured = [line for line in metrics if "held_out_loss" in line]
    size = len(replies) // max(1, len(measured))
    for line in metrics:
        if "held_out_loss" in line:
            begin = size * measured.index(line)
            lines.append({"held_out": line["step"], "replies": list(replies[begin : begin + size])})
            names = ("loss", "accuracy", "margin")
            lines[-1] |= {name: line[f"held_out_{name}"] for name in names if f"held_out_{name}" in line}
        else:
            kept = {name: line[name] for name in ("loss", "grad_norm", "accuracy", "margin") if name in line}
            lines.append({"step": line["step"], **kept, "s": line["seconds"]})
    return lines


def main() -> None:
    from tinker_local.backend.cli.main import main as tinker_local

    settings, url = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    state = settings["state"] or first_adapter(settings, url)
    watched = Watched()
    replies = Path(settings["folder"]) / "replies.jsonl"
    os.environ["REPLIES"] = str(replies)
    tinker_local(command(settings, url, state), standalone_mode=False)
    metrics = [json.loads(line) for line in (Path(settings["folder"]) / "run" / "metrics.jsonl").open()]
    for line in told(metrics, [json.loads(line) for line in replies.open()]):
        say(**line)
    say(sha256=watched.seen.hexdigest(), total_s=time.perf_counter() - BEGAN)


if __name__ == "__main__":
    main()
