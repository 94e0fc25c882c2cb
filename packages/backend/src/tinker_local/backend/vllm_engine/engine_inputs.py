"""Translates requests into vLLM's, and its outputs into ours."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tinker_local.backend.rendering.grammar import Grammar
from tinker_local.backend.rendering.rendered_input import RenderedImage, RenderedInput
from tinker_local.backend.sampling.prompt_scores import PromptQuestions, check_sample_topk
from tinker_local.backend.sampling.sampler import DrawnTokens, EngineClock, Penalties, SampleWork, token_budget
from tinker_local.backend.training.routes import with_common
from tinker_local.backend.vllm_engine.compat_vllm import SAMPLED_TEMPERATURE_MIN
from tinker_local.backend.vllm_engine.grammar_masks import SEAT, Seat
from tinker_local.backend.vllm_engine.grammar_process import Matcher
from tinker_local.backend.vllm_engine.record_routes import ASKED
from tinker_local.backend.vllm_engine.score_prompts import ask
from tinker_local.types import (
    InternalError,
    InvalidRequestError,
    SampledSequence,
    SampleOutput,
    TopkLogprobs,
)


def engine_prompt(prompt: RenderedInput) -> Any:
    """vLLM's input with explicit image offsets; without images it equals a plain token list."""
    from vllm.inputs import mm_input, tokens_input

    ids = prompt.token_ids.tolist()
    if not prompt.images:
        return tokens_input(ids)
    from vllm.multimodal.inputs import PlaceholderRange

    images = [placement.image for placement in prompt.images]
    return mm_input(
        ids,
        mm_kwargs={"image": [image.vllm_item for image in images]},
        mm_hashes={"image": [image.content_hash for image in images]},
        mm_placeholders={
            "image": [
                PlaceholderRange(offset=p.offset, length=p.image.num_tokens, is_embed=_holds_features(p.image))
                for p in prompt.images
            ]
        },
    )


def _holds_features(image: RenderedImage) -> Any:
    """As vLLM's `PlaceholderRange` takes it, a tensor; None if all positions of `image` do."""
    if image.positions is None or image.positions.holds_features.all():
        return None
    import torch

    return torch.from_numpy(image.positions.holds_features.copy())


def with_own_features(prompt: Any, version: str) -> Any:
    """`prompt`, whose images have other features than for the base model: those of the adapter `version`."""
    if "mm_hashes" not in prompt:
        return prompt
    hashes = {kind: [f"{version}:{image}" for image in images] for kind, images in prompt["mm_hashes"].items()}
    return prompt | {"mm_hashes": hashes}


def engine_params(
    work: SampleWork, limit: int, vocab_size: int, questions: PromptQuestions | None, matcher: Matcher | None = None
) -> tuple[Any, ...]:
    """vLLM's SamplingParams, one for each sample; only the first asks `questions` about the prompt. `matcher`: of the
    grammar, if there is one.

    EOS (the tokenizer's and those of generation_config.json) stops unless `stop` is empty; strings or ids in `stop`
    stop as well. Stop strings are matched on the decoded text, special tokens included.
    """
    budget = token_budget(work.prompt.length, work.params.max_tokens, limit)
    check_sample_topk(work.topk_sample_logprobs, work.num_samples, budget, vocab_size)
    params = _first_params(work, budget, vocab_size)
    params.logprobs = work.topk_sample_logprobs  # besides the sampled token's
    samples, seeds = [], work.seeds()
    for index in range(work.num_samples):
        sample = copy.copy(params)
        if seeds is not None:
            sample.seed = seeds[index]
        if matcher is not None or work.routes:
            seat = {} if matcher is None else {SEAT: Seat(matcher, index)}
            sample.extra_args = {**seat, **({ASKED: True} if work.routes else {})}
        if questions is not None and index == 0:
            ask(sample, questions)
        samples.append(sample)
    return tuple(samples)


def _structured_outputs(grammar: Grammar | None) -> Any:
    """vLLM's: that there is a grammar. It reads none; masks come from the `Seat` of each sample."""
    if grammar is None:
        return None
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json_object=True)


def _first_params(work: SampleWork, budget: int, vocab_size: int) -> Any:
    import vllm
    from vllm.sampling_params import RequestOutputKind

    params, penalties, streamed = work.params, work.penalties or Penalties(), work.drawn is not None
    texts, ids = _stops(params.stop, vocab_size)
    _check_temperature(params.temperature)
    result = vllm.SamplingParams(
        temperature=1.0 if params.temperature else 0.0,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        max_tokens=budget,
        stop=texts,
        stop_token_ids=ids,
        ignore_eos=params.stop == (),
        detokenize=bool(texts),
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        # The token that completes a stop string, or is a stop token, belongs to the sample.
        include_stop_str_in_output=True,
        logprobs=0,  # only the sampled token's
        presence_penalty=penalties.presence,
        frequency_penalty=penalties.frequency,
        structured_outputs=_structured_outputs(work.grammar),
        output_kind=RequestOutputKind.CUMULATIVE if streamed else RequestOutputKind.FINAL_ONLY,
        # This object is not shared, so vLLM may copy it shallowly; then it does not check the temperature again.
        skip_clone=True,
    )
    # The constructor raises 0 < T < 0.01 to 0.01 and refuses T > 2; the sampler accepts any.
    result.temperature = params.temperature
    return result


def _check_temperature(temperature: float) -> None:
    if 0 < temperature < SAMPLED_TEMPERATURE_MIN:
        raise InvalidRequestError(
            f"sampling_params.temperature: {temperature} is too small to sample with; "
            f"the least is {SAMPLED_TEMPERATURE_MIN}, and 0 takes the most likely token"
        )


def _stops(stop: str | tuple[str, ...] | tuple[int, ...] | None, vocab_size: int) -> tuple[list[str], list[int]]:
    stops = (stop,) if isinstance(stop, str) else stop or ()
    for index, item in enumerate(stops):
        if isinstance(item, int) and not 0 <= item < vocab_size:
            raise InvalidRequestError(
                f"sampling_params.stop[{index}]: token id {item} is outside the vocabulary of {vocab_size} tokens"
            )
    return [item for item in stops if isinstance(item, str)], [item for item in stops if isinstance(item, int)]


def sample_output(
    outputs: Sequence[Any], work: SampleWork, questions: PromptQuestions | None, clock: EngineClock
) -> SampleOutput:
    """The result of vLLM's final outputs, one per sample, which `clock` has followed. The first one has the answers to
    `questions`."""
    asked = {} if questions is None else outputs[0].prompt_logprobs.fields(questions)
    sequences = tuple(_sequence(output.outputs[0], work.topk_sample_logprobs) for output in outputs)
    if work.routes:
        sequences = _with_routes(sequences, outputs, work.prompt.length)
    return SampleOutput(
        sequences=sequences,
        prompt_cache_hit_tokens=outputs[0].num_cached_tokens or 0,
        times=clock.times(
            min(output.outputs[0].logprobs.since for output in outputs),
            max(sequence.tokens.size for sequence in sequences),
        ),
        **asked,
    )


def _with_routes(
    sequences: Sequence[SampledSequence], outputs: Sequence[Any], prompt_length: int
) -> tuple[SampledSequence, ...]:
    """`sequences` with the experts of their positions, but for the last, which has not been computed. Of the prompt,
    those that are the first sequence's are one array."""
    pending = [getattr(output, "routes", None) for output in outputs]
    lengths = [prompt_length + sequence.tokens.size - 1 for sequence in sequences]
    rows = [each.read(length) for each, length in zip(pending, lengths, strict=True) if each is not None]
    if len(rows) < len(sequences):
        return tuple(sequences)
    found = with_common(rows, prompt_length)
    return tuple(one.model_copy(update={"routes": each}) for one, each in zip(sequences, found, strict=True))


def without_last(work: SampleWork) -> SampleWork:
    """`work`, whose prompt leaves room for one token. It is enough to score the whole one: nothing is asked about the
    last position, only about its token."""
    prompt = RenderedInput(work.prompt.token_ids[:-1], work.prompt.images)
    return replace(work, prompt=prompt, drawn=None)


class TokenStream:
    """Gives `work.drawn` what is new in vLLM's cumulative outputs. Used on the engine's thread."""

    def __init__(self, work: SampleWork) -> None:
        self._work = work
        self._given = [0] * work.num_samples

    def output(self, index: int, output: Any) -> None:
        """Take the output so far of one sequence."""
        (completion,) = output.outputs
        start = self._given[index]
        self._given[index] = end = len(completion.token_ids)
        if (start == end and completion.finish_reason is None) or self._work.drawn is None:
            return
        logprobs: Sequence[Any] = completion.logprobs[start:end]
        likeliest: tuple[tuple[tuple[int, float], ...], ...] = ()
        if self._work.topk_sample_logprobs:
            logprobs, ids, values = zip(*logprobs, strict=True) if logprobs else ((), (), ())
            likeliest = tuple(
                tuple(zip(row.tolist(), of_row.tolist(), strict=True)) for row, of_row in zip(ids, values, strict=True)
            )
        tokens, reason = tuple(completion.token_ids[start:end]), completion.finish_reason
        if reason not in (None, "stop", "length"):
            return  # `sample_output` raises it
        sample = self._work.first_sample + index
        self._work.drawn(DrawnTokens(sample, tokens, tuple(map(float, logprobs)), likeliest, reason))


def _sequence(completion: Any, topk: int) -> SampledSequence:
    if completion.finish_reason not in ("stop", "length"):
        raise InternalError(f"vLLM ended a sample with {completion.finish_reason!r}")
    logprobs, likeliest = completion.logprobs, None
    if topk:
        logprobs, ids, values = zip(*completion.logprobs, strict=True)  # at least one token is sampled
        likeliest = TopkLogprobs(token_ids=np.stack(ids), logprobs=np.stack(values))
    return SampledSequence(
        stop_reason=completion.finish_reason,
        tokens=np.asarray(completion.token_ids, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        topk_logprobs=likeliest,
    )
