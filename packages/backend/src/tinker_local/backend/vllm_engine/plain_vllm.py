"""`python -m tinker_local.backend.vllm_engine.plain_vllm FOLDER`: vLLM as a user runs it, with one adapter.

Reads `asked.json` (model, dtype, adapter, max_lora_rank, prompts as token ids, whether experts share factors, whether
the adapter changes the vision tower, and whether vLLM has to be told to normalise pixels) and `picture.png` of the
folder, samples greedily, and writes `answers.json`: tokens and logprobs for each prompt. Of this project's patches,
only those are applied without which vLLM on a CPU has no such layers, or computes them otherwise than on GPUs.
"""

import json
import sys
from pathlib import Path
from typing import Any

TOKENS = 8
"""How many are sampled after each prompt."""


def main(folder: Path) -> None:
    """Answer `asked.json`."""
    from tinker_local.backend.vllm_engine.build_engine import prepare_environment
    from tinker_local.backend.vllm_engine.compat_vllm import image_arguments
    from tinker_local.backend.vllm_engine.delta_net_on_cpu import take_float32
    from tinker_local.backend.vllm_engine.rotary_on_cpu import read_heads
    from tinker_local.backend.vllm_engine.vllm_experts import take_adapters_on_cpu
    from tinker_local.backend.vllm_engine.whole_images import see_whole_images

    prepare_environment()
    take_float32()  # without these, vLLM has such layers on GPUs alone
    take_adapters_on_cpu()
    see_whole_images()
    read_heads()
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    asked = json.loads((folder / "asked.json").read_text())
    picture = folder / "picture.png"
    image = Image.open(picture).convert("RGB") if picture.exists() else None
    llm = LLM(
        asked["model"],
        dtype=asked["dtype"],
        enable_lora=True,
        max_lora_rank=asked["max_lora_rank"],
        max_loras=1,
        enable_moe_shared_loras=asked["experts"],
        enable_tower_connector_lora=asked["tower"],
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=2**28,
        gpu_memory_utilization=0.05,
        enforce_eager=True,
        **(image_arguments() if asked["raw"] else {}),
    )
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    if image is not None:
        prompts[-1]["multi_modal_data"] = {"image": image}
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params, lora_request=LoRARequest("trained", 1, asked["adapter"]), use_tqdm=False)
    answers = []
    for output in outputs:
        (answer,) = output.outputs
        tokens = [int(token) for token in answer.token_ids]
        pairs = zip(answer.logprobs, tokens, strict=True)
        answers.append({"tokens": tokens, "logprobs": [each[token].logprob for each, token in pairs]})
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
