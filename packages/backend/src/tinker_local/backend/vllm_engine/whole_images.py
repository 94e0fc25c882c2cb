"""Images whose positions see each other: in one step, and on the CPU, where vLLM attends causally whatever the model.

vLLM tells attention where images are (`mm_req_doc_ranges`), and its backend for CPUs ignores it. Its kernel takes a
flag for each request, though: whether its queries see only what precedes them. So the requests of a step are cut where
images begin and end, and the kernel gets each piece as a request that ends with its last query.
"""

import dataclasses
import functools
import itertools
from typing import Any

import torch


def see_whole_images() -> None:
    """Let the positions of an image see each other in vLLM's attention for CPUs, in engines built from now on."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

    original: Any = CPUAttentionMetadataBuilder.build
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **further: Any) -> Any:
        step = common_attn_metadata if _without_windows_in_gemma4(self) else _cut_at_images(common_attn_metadata)
        # Older versions give both by name.
        return original(self, common_prefix_len, step, *args, **further)

    CPUAttentionMetadataBuilder.build = build


def _without_windows_in_gemma4(builder: Any) -> bool:
    """Whether `builder` is that of layers of Gemma 4 without a window, which read images as text, whatever the others
    do."""
    config = builder.vllm_config.model_config.hf_text_config
    return bool(config.model_type == "gemma4_text" and builder.window_size == -1)


def check_steps(config: Any, _: int) -> None:
    """Have vLLM refuse steps that are smaller than an image, as it does for these models on CUDA."""
    if sees_images(config.model_config):
        config.scheduler_config.disable_chunked_mm_input = True


def keep_images_whole(scheduler: Any, model_config: Any) -> None:
    """Never split an image over two steps: its first positions need the last.

    vLLM's own rule leaves out an image that begins where the last step has ended: the next one takes as many of its
    positions as others leave room for.
    """
    if not sees_images(model_config):
        return
    original = scheduler._try_schedule_encoder_inputs

    def schedule(request: Any, done: int, new: int, *rest: Any, **further: Any) -> Any:
        for feature in request.mm_features:
            place = feature.mm_position
            if place.offset < done + new < place.offset + place.length:
                new = max(0, place.offset - done)
                break
        return original(request, done, new, *rest, **further)

    scheduler._try_schedule_encoder_inputs = schedule


def sees_images(model_config: Any) -> bool:
    """Whether the positions of an image see each other."""
    return bool(model_config.is_multimodal_model and model_config.is_mm_prefix_lm)


def _cut_at_images(step: Any) -> Any:
    """vLLM's `CommonAttentionMetadata` of `step`, in which positions of images are requests that are not causal."""
    if not any((step.mm_req_doc_ranges or {}).values()):
        return step
    queries, lengths = itertools.pairwise(step.query_start_loc.tolist()), step.seq_lens.tolist()
    ends, stops, rows, causal = [0], [], [], []
    for request, ((first, after), length) in enumerate(zip(queries, lengths, strict=True)):
        images = step.mm_req_doc_ranges.get(request, ())
        for start, stop, is_image in _pieces(length - (after - first), length, images):
            ends.append(ends[-1] + stop - start)
            stops.append(stop)
            rows.append(request)
            causal.append(not is_image)
    like = {"dtype": torch.int32, "device": step.seq_lens.device}
    bounds, longest = torch.tensor(ends, **like), max(b - a for a, b in itertools.pairwise(ends))
    return dataclasses.replace(
        step,
        num_reqs=len(rows),
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        seq_lens=torch.tensor(stops, **like),
        max_query_len=longest,
        block_table_tensor=step.block_table_tensor[rows],
        causal=torch.tensor(causal, **like),
    )


def _pieces(begin: int, end: int, images: Any) -> list[tuple[int, int, bool]]:
    """Cut [begin, end) into texts and images: start, stop, and whether it is an image. `images`: first and last
    position of each, in order."""
    found = []
    for first, last in images:
        start, stop = max(first, begin), min(last + 1, end)
        if start < stop:
            if begin < start:
                found.append((begin, start, False))
            found.append((start, stop, True))
            begin = stop
    if begin < end:
        found.append((begin, end, False))
    return found
