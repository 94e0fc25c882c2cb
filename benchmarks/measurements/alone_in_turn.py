"""`python -m measurements.alone_in_turn SCALE MODEL ADAPTER`: vLLM's `LLM` for `stacks.py`. Reads the number of a turn
from each line, and prints `ANSWER` and the seconds of its work."""

import sys
from pathlib import Path


def main(scale_name: str, model: str, adapter: str) -> None:
    from baselines.vllm_alone import VLLMAlone
    from harness.scale import SCALES
    from stacks import prompts_of

    scale = SCALES[scale_name]
    engine = VLLMAlone(scale, Path(model), Path(adapter), share=0.4)
    print("ANSWER 0", flush=True)
    for line in sys.stdin:
        rate = engine.output_tokens_per_second(prompts_of(scale, int(line)), scale.output_tokens)
        print(f"ANSWER {scale.requests * scale.output_tokens / rate}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
