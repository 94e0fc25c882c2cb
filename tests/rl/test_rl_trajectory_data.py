"""Trajectories as training data: the tokens that were given and sampled, and what each of them carries."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tinker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinker_local.client import rl
from tinker_local.types import InvalidRequestError
from tinker_local.types.sdk import from_sdk

from tests.conftest import few
from tests.rl import chat_templates as templates

TEMPLATES = {"Qwen3-VL": None, **templates.CONTINUING, "thinking": templates.THINKING}
quick = settings(deadline=None, max_examples=few(40), suppress_health_check=list(HealthCheck))


def positions(elements: list[Any]) -> list[Any]:
    """One entry per position: a token, or (image, number of its position)."""
    found: list[Any] = []
    for element in elements:
        found += [element] if isinstance(element, int) else [(element.data, i) for i in range(element.length)]
    return found


def array(datum: tinker.Datum, name: str) -> list[float]:
    return list(datum.loss_fn_inputs[name].to_numpy().tolist())


def contents(data: list[tinker.Datum]) -> list[Any]:
    """All of `data` as values that compare; the SDK's tensors do not."""
    return [
        (
            each.model_input,
            {name: array(each, name) for name in each.loss_fn_inputs},
            each.model_input_spans,
            each.loss_fn_input_spans,
        )
        for each in data
    ]


def covered(datum: tinker.Datum, spans: Any, turns: list[rl.Turn], elements_of: Any) -> list[Any]:
    """What the spans say that the positions are, looked up in the requests and samples that they name."""
    by_id = {turn.sequence_id: turn for turn in turns}
    found: list[Any] = []
    for span in spans:
        turn = by_id[span.sequence_id]
        prompted = isinstance(span, tinker.PromptProvenanceSpan)
        source = positions(elements_of(turn.prompt)) if prompted else list(turn.tokens)
        assert span.offset + span.length <= len(source)
        assert span.length > 0
        found += source[span.offset : span.offset + span.length]
    return found


@st.composite
def episodes(draw: st.DrawFn, with_images: bool) -> list[tuple[list[Any], list[Any]]]:
    """Observations (text and numbers of images) and replies (ids below 486, words, or endings) in turn."""
    words = st.sampled_from(["red", " a square\n", "<|im_end|>", "<|image_pad|>", "\U0001f600", "</think>", ""])
    parts = st.lists(words | st.integers(0, 3) if with_images else words, min_size=1, max_size=4).filter(
        lambda found: sum(isinstance(part, int) for part in found) <= 3
    )
    endings = st.sampled_from([["END"], [], [486], ["EOS"]])
    ids = st.lists(st.integers(0, 511), max_size=6)
    thoughts = st.sampled_from([[], ["<think>\nhm\n</think>\n\n"]])
    replies = st.tuples(thoughts, ids, endings).map(lambda three: list(itertools.chain(*three)))
    return draw(st.lists(st.tuples(parts, replies), min_size=1, max_size=6))


def play(
    chat: rl.Chat, images: list[Any], episode: list[tuple[list[Any], list[Any]]], spell: Any, turn: Any
) -> list[rl.Turn]:
    conversation: rl.Conversation | None = None
    turns: list[rl.Turn] = []
    for index, (parts, reply) in enumerate(episode):
        observation = rl.as_messages([images[part] if isinstance(part, int) else part for part in parts])
        if conversation is None:
            conversation = rl.Conversation(chat, observation)
        else:
            conversation.observe(observation)
        names = {"END": chat.stop[0], "EOS": chat.tokenizer.eos_token_id}
        sampled = spell(*(names.get(piece, piece) for piece in reply))
        turns.append(turn(conversation.prompt, sampled, f"request-{index}"))
        conversation.reply(sampled)
    return turns


@pytest.mark.mutation(
    "observations-trained",
    "_Sequence.append",
    "self._advantages += [np.zeros(given, np.float32),",
    "self._advantages += [np.full(given, advantage, np.float32),",
)
@pytest.mark.mutation("logprobs-one-off", "_Sequence.data", '"logprobs": logprobs[1:]', '"logprobs": logprobs[:-1]')
@pytest.mark.parametrize("family", TEMPLATES)
@quick
@given(data=st.data())
def test_a_datum_is_what_was_given_and_sampled(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    images: list[tinker.types.ImageChunk],
    elements_of: Callable[..., list[Any]],
    turn: Callable[..., rl.Turn],
    family: str,
    data: st.DataObject,
) -> None:
    thinking = family == "thinking"
    episode = data.draw(episodes(with_images=not thinking))
    turns = play(make_chat(TEMPLATES[family]), images, episode, spell, turn)
    advantages = [float(index + 1) / 4 for index in range(len(turns))]
    found = rl.turns_to_data(turns, advantages)

    # Which turns each datum must hold: a prompt that begins with all there was goes on with it.
    expected: list[list[int]] = []
    whole: list[Any] = []
    for index, each in enumerate(turns):
        prompt = elements_of(each.prompt)
        if not each.tokens:
            continue
        if expected and prompt[: len(whole)] == whole:
            expected[-1].append(index)
        else:
            expected.append([index])
        whole = [*prompt, *each.tokens]
    assert len(found) == len(expected)
    assert thinking or len(found) <= 1

    for datum, members in zip(found, expected, strict=True):
        last = turns[members[-1]]
        whole = positions([*elements_of(last.prompt), *last.tokens])
        inputs = elements_of(datum.model_input)
        assert positions(inputs) == whole[:-1]
        assert array(datum, "target_tokens") == [token if isinstance(token, int) else 0 for token in whole[1:]]
        logprobs, values = np.zeros(len(whole)), np.zeros(len(whole))
        for index in members:
            start = turns[index].prompt.length
            logprobs[start : start + len(turns[index].tokens)] = turns[index].logprobs
            values[start : start + len(turns[index].tokens)] = advantages[index]
        assert array(datum, "logprobs") == logprobs[1:].tolist()
        assert array(datum, "advantages") == values[1:].tolist()
        assert datum.loss_fn_inputs.keys() == {"target_tokens", "logprobs", "advantages"}

        assert covered(datum, datum.model_input_spans, turns, elements_of) == whole[:-1]
        assert covered(datum, datum.loss_fn_input_spans, turns, elements_of) == whole[1:]
        sampled = [
            isinstance(span, tinker.SampledProvenanceSpan)
            for span in datum.loss_fn_input_spans or ()
            for _ in range(span.length)
        ]
        assert sampled == (values[1:] != 0).tolist()

        ours = from_sdk(datum)
        assert ours.model_input.length == len(ours.loss_fn_inputs["target_tokens"].data) == len(whole) - 1
        # Text between two images is one chunk.
        kinds = [type(chunk) for chunk in datum.model_input.chunks]
        assert (tinker.EncodedTextChunk, tinker.EncodedTextChunk) not in list(pairwise(kinds))

    supervised = rl.turns_to_data(turns, advantages, "cross_entropy")
    for datum, other in zip(found, supervised, strict=True):
        assert other.loss_fn_inputs.keys() == {"target_tokens", "weights"}
        assert array(other, "weights") == array(datum, "advantages")
        assert other.model_input == datum.model_input
        assert other.model_input_spans == datum.model_input_spans


@pytest.mark.parametrize("family", TEMPLATES)
def test_written_conversations_are_what_a_rollout_of_the_same_replies_gives(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    images: list[tinker.types.ImageChunk],
    turn: Callable[..., rl.Turn],
    family: str,
) -> None:
    chat = make_chat(TEMPLATES[family])
    first = ["What?"] if family == "thinking" else ["What?", images[0]]
    thoughts = "<think>\nhm\n</think>\n\n" if family == "thinking" else ""
    # One template puts a space in front of replies, and so does a model that was trained with it.
    space = " " if family in ("no end", "parts alone") else ""
    replies = [f"{thoughts}red <|im_end|> one", "no"]
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": replies[0]},
        {"role": "user", "content": "Next?"},
        {"role": "assistant", "content": replies[1]},
        {"role": "user", "content": "Thanks."},
    ]
    conversation = rl.Conversation(chat, rl.as_messages(first))
    marked = [*spell(f"{space}{thoughts}red "), *spell("<", "|im_end|>"), *spell(" one"), *chat.stop]
    turns = [turn(conversation.prompt, marked)]
    conversation.reply(marked)
    conversation.observe(rl.as_messages("Next?"))
    turns.append(turn(conversation.prompt, [*spell(f"{space}no"), *chat.stop]))
    assert contents(rl.conversation_data(chat, messages)) == contents(rl.turns_to_data(turns, 1.0, "cross_entropy"))
    assert contents(rl.conversation_data(chat, messages, [0.0, 2.0])) == contents(
        rl.turns_to_data(turns, [0.0, 2.0], "cross_entropy")
    )
    assert len(turns) == 2
    assert len(rl.conversation_data(chat, messages)) == (2 if family == "thinking" else 1)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "assistant", "content": "a"}], r"messages\[0\]: a reply must follow a message of another role"),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "assistant"}],
            r"messages\[2\]: a reply must follow a message of another role",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": np.zeros((64, 64, 3), np.uint8)}],
            r"messages\[1\]: the assistant's messages are text",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [{"name": "c"}]}],
            r"messages\[1\]: tool_calls: a reply is trained as the text",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "c"}],
            r"messages\[1\]: reasoning_content: ",
        ),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "\ud800"}], r"messages\[1\]: .*U\+D800"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: must be text, an image"),
    ],
)
def test_written_conversations_that_cannot_be_trained(
    make_chat: Callable[..., rl.Chat], messages: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        rl.conversation_data(make_chat(), messages)


def test_columns_that_a_dataset_leaves_empty_do_not_matter(make_chat: Callable[..., rl.Chat]) -> None:
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    wide = [{**message, "tool_calls": None, "reasoning_content": ""} for message in plain]
    assert contents(rl.conversation_data(make_chat(), wide)) == contents(rl.conversation_data(make_chat(), plain))


def test_a_sequence_that_begins_with_an_image(
    images: list[tinker.types.ImageChunk], turn: Callable[..., rl.Turn], elements_of: Callable[..., list[Any]]
) -> None:
    (datum,) = rl.turns_to_data([turn([images[0]], [5, 6], "a")], 2.0)
    length = images[0].length
    assert elements_of(datum.model_input) == [images[0], 5]
    assert array(datum, "target_tokens") == [0] * (length - 1) + [5, 6]
    assert array(datum, "advantages") == [0.0] * (length - 1) + [2.0, 2.0]
    assert datum.model_input_spans == [
        tinker.PromptProvenanceSpan(sequence_id="a", offset=0, length=length),
        tinker.SampledProvenanceSpan(sequence_id="a", offset=0, length=1),
    ]
    assert datum.loss_fn_input_spans == [
        tinker.PromptProvenanceSpan(sequence_id="a", offset=1, length=length - 1),
        tinker.SampledProvenanceSpan(sequence_id="a", offset=0, length=2),
    ]


def test_the_smallest_sequences(turn: Callable[..., rl.Turn], elements_of: Callable[..., list[Any]]) -> None:
    assert rl.turns_to_data([]) == []
    assert rl.turns_to_data([turn([], [5], "a")]) == []  # nothing predicts it
    assert rl.turns_to_data([turn([4], [], "a")]) == []  # nothing was sampled
    (datum,) = rl.turns_to_data([turn([4], [5], "a")])
    assert elements_of(datum.model_input) == [4]
    assert array(datum, "target_tokens") == [5]
    assert datum.model_input_spans == [tinker.PromptProvenanceSpan(sequence_id="a", length=1)]
    assert datum.loss_fn_input_spans == [tinker.SampledProvenanceSpan(sequence_id="a", length=1)]
    (datum,) = rl.turns_to_data([turn([], [5, 6], "a")])
    assert datum.model_input_spans == [tinker.SampledProvenanceSpan(sequence_id="a", length=1)]
    assert datum.loss_fn_input_spans == [tinker.SampledProvenanceSpan(sequence_id="a", offset=1, length=1)]


def test_samples_of_no_tokens_are_passed_over(
    turn: Callable[..., rl.Turn], elements_of: Callable[..., list[Any]]
) -> None:
    turns = [turn([1], [], "a"), turn([1, 2], [3], "b"), turn([1, 2, 3, 4], [], "c"), turn([1, 2, 3, 4, 5], [6], "d")]
    (datum,) = rl.turns_to_data(turns, [1.0, 2.0, 3.0, 4.0])
    assert elements_of(datum.model_input) == [1, 2, 3, 4, 5]
    assert array(datum, "advantages") == [0, 2, 0, 0, 4]
    spans = [(span.sequence_id, span.offset, span.length) for span in datum.model_input_spans or ()]
    assert spans == [("b", 0, 2), ("b", 0, 1), ("d", 3, 2)]


def test_a_prompt_that_only_resembles_begins_anew(
    images: list[tinker.types.ImageChunk], turn: Callable[..., rl.Turn]
) -> None:
    for second in ([1, 2, 4], [1, 2], [images[1], 2, 3], [1, 2, 3][::-1]):
        assert len(rl.turns_to_data([turn([1, 2], [3]), turn([*second], [9])])) == 2
    # Other pixels of the same size are another prompt, equal pixels are not.
    other = images[0].model_copy(update={"data": images[0].data + b" "})
    same = images[0].model_copy()
    assert len(rl.turns_to_data([turn([images[0]], [3]), turn([other, 3], [9])])) == 2
    assert len(rl.turns_to_data([turn([images[0]], [3]), turn([same, 3], [9])])) == 1


def test_one_turn_without_a_request_leaves_its_datum_without_provenance(turn: Callable[..., rl.Turn]) -> None:
    (datum,) = rl.turns_to_data([turn([1], [2], "a"), turn([1, 2], [3], "")])
    assert datum.model_input_spans is None
    assert datum.loss_fn_input_spans is None


def test_a_thought_that_begins_behind_an_answer_is_no_loss(
    make_chat: Callable[..., rl.Chat], spell: Callable[..., list[Any]]
) -> None:
    conversation = rl.Conversation(make_chat(templates.THINKING), rl.as_messages("a"))
    conversation.reply(spell("<think>\nhm\n</think>\n\nred<think>"))
    conversation.observe(rl.as_messages("b"))
    assert not conversation.continues


def test_advantages_of_any_number_type(turn: Callable[..., rl.Turn]) -> None:
    turns = [turn([1], [2]), turn([1, 2], [3])]
    for advantage in (2, 2.0, np.float32(2), np.float64(2), np.array(2.0), [2, 2], np.array([2.0, 2.0], np.float32)):
        (datum,) = rl.turns_to_data(turns, advantage)  # type: ignore[arg-type]
        assert array(datum, "advantages") == [2.0, 2.0]
    for wrong in ([1.0], [1.0, 2.0, 3.0], []):
        with pytest.raises(InvalidRequestError, match=f"advantage: {len(wrong)} numbers for 2 turns"):
            rl.turns_to_data(turns, wrong)


def test_tokens_of_numpy_are_tokens(turn: Callable[..., rl.Turn], elements_of: Callable[..., list[Any]]) -> None:
    one = turn([1], [2, 3])
    many = replace(one, tokens=tuple(np.array(one.tokens, np.int32)))
    assert contents(rl.turns_to_data([many])) == contents(rl.turns_to_data([one]))


def test_logprobs_of_another_number_than_tokens_are_refused(turn: Callable[..., rl.Turn]) -> None:
    one = turn([1], [2, 3])
    with pytest.raises(InvalidRequestError, match=r"turns\[1\]: 1 logprobs for 2 tokens"):
        rl.turns_to_data([one, replace(one, logprobs=one.logprobs[:1])])


def test_a_trajectory_s_numbers(turn: Callable[..., rl.Turn]) -> None:
    turns = (turn([1], [2, 3], "a", reward=0.5), turn([1, 2, 3], [], "b", reward=-1.0))
    trajectory = rl.Trajectory(turns, "terminated")
    assert (trajectory.reward, trajectory.num_tokens, trajectory.trainable) == (-0.5, 2, True)
    assert contents(trajectory.data(3.0)) == contents(rl.turns_to_data(turns, 3.0))
    assert contents(trajectory.data([3.0, 1.0], "cross_entropy")) == contents(
        rl.turns_to_data(turns, [3.0, 1.0], "cross_entropy")
    )
    assert not rl.Trajectory((), "context").trainable
    assert not rl.Trajectory(turns, "failed", failure=rl.Failure("environment", "broke")).trainable
