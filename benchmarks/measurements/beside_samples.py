"""Answers that a model samples to questions, for pairs of a better and a worse one.

`python -m measurements.beside_samples SETTINGS URL`: `prompts` of SETTINGS are token ids. Prints one line with
`samples`: for each prompt the texts of its `group` samples that ended by themselves, up to the end of their line.
"""

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    import tinker
    from transformers import AutoTokenizer

    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    service = tinker.ServiceClient(base_url=sys.argv[2], api_key="tml-local")
    sampler = service.create_sampling_client(base_model=settings["name"]).result()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    futures = []
    for place, ids in enumerate(settings["prompts"]):
        params = tinker.SamplingParams(
            max_tokens=settings["max_tokens"], temperature=1.0, seed=place, stop=settings["stop"]
        )
        futures.append(sampler.sample(tinker.ModelInput.from_ints(ids), settings["group"], params))
    samples = []
    for future in futures:
        ended = [each.tokens for each in future.result().sequences if each.stop_reason == "stop"]
        texts = [tokenizer.decode(tokens, skip_special_tokens=True).partition("\n")[0] for tokens in ended]
        samples.append(texts)
    print(json.dumps({"samples": samples}), flush=True)


if __name__ == "__main__":
    main()
