"""Thinking templates, templates that lose something, templates that refuse: never a silent mismatch."""

from collections.abc import Callable
from typing import Any

import pytest
import tinker
from tinker_local.client import rl
from tinker_local.types import InvalidRequestError

from tests.rl import chat_templates as templates

START, END = "<|im_start|>", "<|im_end|>"
THOUGHT = "<think>\nlooks red\n</think>\n\nred"


@pytest.fixture
def template_tokens(make_chat: Callable[..., rl.Chat]) -> Callable[..., list[int]]:
    """HF's tokens of messages, with a generation prompt."""

    def tokens(template: str, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        how: dict[str, Any] = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
        found = make_chat().tokenizer.apply_chat_template(messages, chat_template=template, **how, **options)
        return list(found)

    return tokens


def says(*contents: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def test_thoughts_are_dropped_before_a_new_query_and_each_turn_is_a_datum(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    template_tokens: Callable[..., list[int]],
    elements_of: Callable[..., list[Any]],
    turn: Callable[..., rl.Turn],
) -> None:
    chat = make_chat(templates.THINKING)
    sampled = spell(THOUGHT, END)
    conversation = rl.Conversation(chat, rl.as_messages("What?"))
    first = conversation.prompt
    assert conversation.reply(sampled) == THOUGHT
    conversation.observe(rl.as_messages("Next?"))
    assert not conversation.continues
    second = elements_of(conversation.prompt)
    assert second == template_tokens(templates.THINKING, says("What?", THOUGHT, "Next?"))
    assert second == spell(
        *(START, "user\nWhat?", END, "\n", START, "assistant\nred", END, "\n"),
        *(START, "user\nNext?", END, "\n", START, "assistant\n"),
    )
    turns = [turn(first, sampled, "a"), turn(conversation.prompt, sampled, "b")]
    data = rl.turns_to_data(turns, [1.0, 2.0])
    assert [elements_of(datum.model_input) for datum in data] == [
        [*elements_of(each.prompt), *sampled[:-1]] for each in turns
    ]


def test_thoughts_stay_before_the_answers_of_tools(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    talk: Callable[..., rl.Conversation],
    template_tokens: Callable[..., list[int]],
    elements_of: Callable[..., list[Any]],
) -> None:
    """Qwen3's `last_query_index`: until a user asks again, thoughts are part of what the model sees."""
    chat = make_chat(templates.THINKING)
    sampled = spell(THOUGHT, END)
    tool = {"role": "tool", "content": "4"}
    once = talk(chat, "What?", sampled, tool)
    assert once.continues
    messages = [*says("What?", THOUGHT), tool]
    assert elements_of(once.prompt) == template_tokens(templates.THINKING, messages)
    twice = talk(chat, "What?", sampled, tool, sampled, tool)
    assert twice.continues
    messages += [{"role": "assistant", "content": THOUGHT}, tool]
    assert elements_of(twice.prompt) == template_tokens(templates.THINKING, messages)
    # A new query drops the thoughts of all replies before it, of those that were kept too.
    asked = talk(chat, "What?", sampled, tool, sampled, tool, sampled, "And now?")
    assert not asked.continues
    messages += [{"role": "assistant", "content": THOUGHT}, {"role": "user", "content": "And now?"}]
    assert elements_of(asked.prompt) == template_tokens(templates.THINKING, messages)
    # And behind it the conversation continues again.
    going_on = talk(chat, "What?", sampled, tool, sampled, "And now?", sampled, tool)
    assert going_on.continues


def test_a_reply_without_thoughts_continues(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    talk: Callable[..., rl.Conversation],
    template_tokens: Callable[..., list[int]],
    elements_of: Callable[..., list[Any]],
) -> None:
    conversation = talk(make_chat(templates.THINKING), "What?", spell("red", END), "Next?")
    assert conversation.continues
    assert elements_of(conversation.prompt) == template_tokens(templates.THINKING, says("What?", "red", "Next?"))


@pytest.mark.parametrize("template", [templates.THINKING, templates.DROPS_EVERY_THOUGHT])
def test_a_prompt_that_opens_a_thought(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    talk: Callable[..., rl.Conversation],
    template_tokens: Callable[..., list[int]],
    elements_of: Callable[..., list[Any]],
    template: str,
) -> None:
    """The model samples the inside of its thought; the template gets the whole of it."""
    options = {"opens_thought": True} if template == templates.THINKING else {}
    chat = make_chat(template, **options)
    assert chat.prefill == "<think>\n"
    begin = elements_of(talk(chat, "What?").prompt)
    assert begin[-2:] == spell("<think>", "\n")
    conversation = talk(chat, "What?", spell("looks red\n</think>\n\nred", END), "Next?")
    assert not conversation.continues
    expected = template_tokens(template, says("What?", THOUGHT, "Next?"), **options)
    assert elements_of(conversation.prompt) == expected
    # Cut before the thought ended: the template finds no thought to drop and shows it all.
    cut = talk(chat, "What?", spell("looks r"), "Next?")
    if template == templates.THINKING:
        assert cut.continues
        assert elements_of(cut.prompt)[: len(begin) + len(spell("looks r"))] == [*begin, *spell("looks r")]
    assert elements_of(cut.prompt) == template_tokens(template, says("What?", "<think>\nlooks r", "Next?"), **options)


def test_a_template_that_drops_a_thought_which_was_cut_goes_on(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    talk: Callable[..., rl.Conversation],
    elements_of: Callable[..., list[Any]],
) -> None:
    template = templates.CHATML.replace("message['content']", "message['content'].split('<think>')[0]")
    conversation = talk(make_chat(template), "What?", spell("<think>\nlooks r"), "Next?")
    assert not conversation.continues
    assert elements_of(conversation.prompt) == spell(
        *(START, "user\nWhat?", END, "\n", START, "assistant\n", END, "\n"),
        *(START, "user\nNext?", END, "\n", START, "assistant\n"),
    )


def test_without_thinking_the_empty_thought_is_in_the_prompt_and_not_in_history(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    talk: Callable[..., rl.Conversation],
    template_tokens: Callable[..., list[int]],
    elements_of: Callable[..., list[Any]],
) -> None:
    chat = make_chat(templates.THINKING, enable_thinking=False)
    assert chat.prefill == "<think>\n\n</think>\n\n"
    begin = (START, "user\nWhat?", END, "\n", START, "assistant\n")
    assert elements_of(talk(chat, "What?").prompt) == spell(*begin, "<think>\n\n</think>\n\n")
    for reply in (("red", END), ("red",)):
        conversation = talk(chat, "What?", spell(*reply), "Next?")
        assert not conversation.continues
        expected = template_tokens(templates.THINKING, says("What?", "red", "Next?"), enable_thinking=False)
        assert elements_of(conversation.prompt) == expected
        assert expected[: len(spell(*begin, "red"))] == spell(*begin, "red")


def test_a_template_that_rewrites_its_beginning_begins_anew(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    talk: Callable[..., rl.Conversation],
    template_tokens: Callable[..., list[int]],
    elements_of: Callable[..., list[Any]],
) -> None:
    conversation = talk(make_chat(templates.COUNTS_MESSAGES), "What?", spell("red", END), "Next?")
    assert not conversation.continues
    expected = template_tokens(templates.COUNTS_MESSAGES, says("What?", "red", "Next?"))
    assert elements_of(conversation.prompt) == expected
    assert expected[:1] == spell("3")


def test_prefills_of_templates_that_write_nothing_for_the_model_are_empty(make_chat: Callable[..., rl.Chat]) -> None:
    plain = [
        None,
        templates.THINKING,
        templates.TRIMMED_HEADERS,
        templates.INST,
        templates.NO_END,
        templates.ROLE_MODEL,
    ]
    assert [make_chat(template).prefill for template in plain] == [""] * len(plain)


def test_marks_of_thoughts_in_an_observation_drop_nothing(
    make_chat: Callable[..., rl.Chat], talk: Callable[..., rl.Conversation], spell: Callable[..., list[Any]]
) -> None:
    chat = make_chat(templates.THINKING)
    text = "a <think>\nb\n</think>\n\nc"
    conversation = talk(chat, text, spell("red", END), text)
    assert conversation.continues
    (first, _, second) = conversation.prompt.chunks
    assert isinstance(first, tinker.EncodedTextChunk)
    assert isinstance(second, tinker.EncodedTextChunk)
    assert chat.decode(first.tokens).count(text) == chat.decode(second.tokens).count(text) == 1


@pytest.mark.parametrize(
    ("template", "reply"),
    [
        (templates.FORGETS_REPLIES, "red"),
        (templates.FORGETS_REPLIES, "What?"),  # a text that stands elsewhere in the conversation
        (templates.CUTS_REPLIES, "a long answer that is cut"),
        (templates.WRITES_REPLIES_ANEW, "red"),
    ],
)
def test_a_template_that_loses_the_reply_is_an_error(
    make_chat: Callable[..., rl.Chat], spell: Callable[..., list[Any]], template: str, reply: str
) -> None:
    if template == templates.WRITES_REPLIES_ANEW:  # it changes the mark too, so it is found at once
        with pytest.raises(rl.ChatTemplateError, match="does not show an assistant's message"):
            make_chat(template)
        return
    conversation = rl.Conversation(make_chat(template), rl.as_messages("What? Is it red?"))
    conversation.reply(spell(reply, END))
    with pytest.raises(rl.ChatTemplateError, match="nor shows the reply") as caught:
        conversation.observe(rl.as_messages("Next?"))
    assert repr(reply) in str(caught.value)


def test_a_short_reply_that_stands_in_the_question_does_not_pass_for_shown(
    make_chat: Callable[..., rl.Chat], spell: Callable[..., list[Any]]
) -> None:
    template = templates.CHATML.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message.role == 'user' or loop.last %}",
    ).replace("{% endfor %}", "{% endif %}{% endfor %}")
    conversation = rl.Conversation(make_chat(template), rl.as_messages("red or blue?"))
    conversation.reply(spell("red", END))
    with pytest.raises(rl.ChatTemplateError, match="nor shows the reply"):
        conversation.observe(rl.as_messages("Next?"))


@pytest.mark.parametrize(
    ("template", "observation", "message"),
    [
        (templates.ROLE_MODEL, says("a", "b")[::-1], "roles must alternate"),
        (templates.ROLE_MODEL, [{"role": "system", "content": "a"}, *says("b")], "System role not supported"),
        (templates.INST, [{"role": "tool", "content": "a"}], "Only user and assistant roles are supported!"),
    ],
)
def test_what_a_template_refuses_is_said_in_its_words(
    make_chat: Callable[..., rl.Chat],
    spell: Callable[..., list[Any]],
    template: str,
    observation: list[dict[str, Any]],
    message: str,
) -> None:
    with pytest.raises(rl.ChatTemplateError, match=message) as caught:
        rl.Conversation(make_chat(template), rl.as_messages(observation))
    assert "cannot render messages of " + ", ".join(each["role"] for each in observation) in str(caught.value)


def test_an_observation_of_a_role_that_a_template_does_not_know_is_not_dropped_in_silence(
    make_chat: Callable[..., rl.Chat], images: list[tinker.types.ImageChunk]
) -> None:
    known = templates.CHATML.replace(
        "{% for message in messages %}", "{% for message in messages if message.role in ['user', 'assistant'] %}"
    )
    tool = {"role": "tool", "content": "4"}
    with pytest.raises(rl.ChatTemplateError, match="does not show the text of every message; their roles: user, tool"):
        rl.Conversation(make_chat(known), rl.as_messages([{"role": "user", "content": "a"}, tool]))
    conversation = rl.Conversation(make_chat(known), rl.as_messages("a"))
    conversation.reply([70])
    with pytest.raises(rl.ChatTemplateError, match="does not show the text of every message; their roles: tool"):
        conversation.observe(rl.as_messages(tool))
    mute = templates.HIDES_OLD_IMAGES.replace("{{ part.text }}", "")
    with pytest.raises(rl.ChatTemplateError, match="does not show the text of every message"):
        rl.Conversation(make_chat(mute), rl.as_messages(["a", images[0]]))


def test_a_refusal_in_a_later_turn(make_chat: Callable[..., rl.Chat], spell: Callable[..., list[Any]]) -> None:
    conversation = rl.Conversation(make_chat(templates.ROLE_MODEL), rl.as_messages("a"))
    conversation.reply(spell("red", templates.EOT))
    with pytest.raises(rl.ChatTemplateError, match="roles must alternate"):
        conversation.observe(rl.as_messages(says("b", "c", "d", "e")[1:]))


@pytest.mark.parametrize("template", [None, templates.TRIMMED_HEADERS, templates.NO_IMAGES, templates.HIDES_OLD_IMAGES])
def test_images_that_a_template_does_not_show_are_an_error(
    make_chat: Callable[..., rl.Chat], images: list[tinker.types.ImageChunk], template: str | None
) -> None:
    chat = make_chat(template)
    if template in (None, templates.TRIMMED_HEADERS):
        assert rl.Conversation(chat, rl.as_messages([*images[:2], "a"])).num_images == 2
        return
    message = {templates.NO_IMAGES: "This model sees no images", templates.HIDES_OLD_IMAGES: "wrote 0 .* for 2 images"}
    with pytest.raises(rl.ChatTemplateError, match=message[template or ""]):
        rl.Conversation(chat, rl.as_messages([*images[:2], "a"]))


def test_templates_that_show_no_assistant_or_nothing_are_refused_at_once(
    vision_processors: tuple[Any, Any], make_chat: Callable[..., rl.Chat]
) -> None:
    with pytest.raises(rl.ChatTemplateError, match="does not show an assistant's message"):
        make_chat("{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}")
    with pytest.raises(rl.ChatTemplateError, match="no speaker allowed"):
        make_chat("{{ raise_exception('no speaker allowed') }}")
    with pytest.raises(rl.ChatTemplateError, match="cannot render"):
        make_chat("{% for %}")

    class Untaught:
        chat_template = None

    with pytest.raises(rl.ChatTemplateError, match="it has no chat template"):
        rl.Chat(Untaught())


def test_written_thoughts_go_where_the_prompt_has_left_off(
    make_chat: Callable[..., rl.Chat], spell: Callable[..., list[Any]], elements_of: Callable[..., list[Any]]
) -> None:
    """What the generation prompt wrote is not trained twice, and a thought that nothing closes is refused."""
    begin = (START, "user\nWhat?", END, "\n", START, "assistant\n")

    def sequence(reply: str, template: str = templates.THINKING, **options: Any) -> list[Any]:
        (datum,) = rl.conversation_data(make_chat(template, **options), says("What?", reply))
        targets: list[Any] = datum.loss_fn_inputs["target_tokens"].to_numpy().tolist()
        return elements_of(datum.model_input)[:1] + targets

    thought = spell(*begin, "<think>", "\n", "looks red\n</think>\n\nred", END)
    assert sequence(THOUGHT) == spell(*begin, THOUGHT, END)
    assert sequence(THOUGHT, opens_thought=True) == thought
    assert sequence("looks red\n</think>\n\nred", opens_thought=True) == thought
    r1 = sequence(THOUGHT, templates.DROPS_EVERY_THOUGHT)
    assert r1[-len(spell(END)) - 3 :] == sequence(THOUGHT)[-4:]
    assert r1.count(spell("<think>")[0]) == 1
    silent = spell(*begin, "<think>\n\n</think>\n\n", "red", END)
    assert sequence("red", enable_thinking=False) == silent
    assert sequence("<think>\n\n</think>\n\nred", enable_thinking=False) == silent
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]: reply: never closes with </think>"):
        sequence("red", opens_thought=True)
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]: reply: begins with <think>"):
        sequence(THOUGHT, enable_thinking=False)
