"""What is trained where a template has marks, appends, rewrites, hides or ends nothing: never a guess."""

from collections.abc import Callable
from typing import Any

import pytest
from tinker_local.client.train.examples import BadRows, Example
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows

from tests.rl import chat_templates as templates
from tests.train_data.conftest import masked, trained_texts

END = "<|im_end|>"


def says(*texts: str) -> dict[str, Any]:
    """User and assistant in turn."""
    return {"messages": [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]}


@pytest.fixture
def masks(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> Callable[..., list[list[tuple[str, bool]]]]:
    """The runs of each example of a row."""

    def masks(row: dict[str, Any], template: str | None = None, **options: Any) -> list[list[tuple[str, bool]]]:
        renderer = renderer_of(template, **options)
        found = rows_of(row, renderer=renderer).examples(0)
        assert not isinstance(found, tuple)
        return [masked(example, renderer.tokenizer) for example in found]  # type: ignore[union-attr]

    return masks


Masks = Callable[..., list[list[tuple[str, bool]]]]


def marked(inside: str, end: str) -> str:
    """ChatML with generation marks around an answer's text, and `inside` of them before it, and with `end` behind."""
    return (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ '<|im_start|>assistant\\n' }}" + inside + "{% else %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ).replace("END", end)


WITHIN = marked("{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}", "")
WITHOUT_END = marked("{% generation %}{{ message.content }}{% endgeneration %}{{ '<|im_end|>\\n' }}", "")
WITH_MORE = marked("{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}", "")
AFTER_A_NOTE = marked("{{ 'NOTE' }}{% generation %}{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}", "")
OF_ALL = (
    "{% for message in messages %}{% generation %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{{ '<|im_end|>\\n' }}{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [WITHIN, WITHOUT_END, WITH_MORE, OF_ALL, templates.CHATML])
def test_an_answer_and_its_end_are_trained_wherever_the_marks_are(masks: Masks, template: str) -> None:
    """Marks that leave out the end would make a model that never stops; marks around a header or a question would train
    what the server writes."""
    assert masks(says("a?", "one", "b?", "two"), template) == [
        [
            ("<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n", False),
            (f"one{END}", True),
            ("\n<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n", False),
            (f"two{END}", True),
        ]
    ]


def test_what_a_template_leaves_out_of_its_marks_is_not_trained(masks: Masks) -> None:
    (found,) = masks(says("a?", "one"), AFTER_A_NOTE.replace("NOTE", "note:\\n"))
    assert found[-2][0].endswith("assistant\nnote:\n")
    assert found[-1] == (f"one{END}", True)


def test_marks_that_cut_a_token_are_refused(rows_of: Callable[..., FileRows], renderer_of: Any) -> None:
    with pytest.raises(BadRows, match=r"messages\[1\]: a token crosses the border of what the chat template marks"):
        rows_of(says("a?", "one"), renderer=renderer_of(AFTER_A_NOTE.replace("NOTE", "note ")))


@pytest.mark.parametrize("template", [WITHIN, WITHOUT_END, WITH_MORE, OF_ALL])
def test_what_is_trained_is_in_hugging_faces_mask_but_for_headers_and_ends(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer], template: str
) -> None:
    """Where the marks are as they should be, both are the same."""
    renderer, row = renderer_of(template), says("a?", "one two", "b?", "three")
    (example,) = rows_of(row, renderer=renderer).examples(0)  # type: ignore[misc]
    inputs = example.datum.loss_fn_inputs
    ours = [0, *map(int, inputs["weights"].tolist())]
    tokens = [example.datum.model_input.to_ints()[0], *inputs["target_tokens"].tolist()]
    told = renderer.tokenizer.apply_chat_template(
        row["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    theirs = told["assistant_masks"][: len(tokens)]
    assert told["input_ids"][: len(tokens)] == tokens
    end = renderer.tokenizer.convert_tokens_to_ids(END)
    if template == WITHIN:
        assert ours == theirs
    differ = [token for token, one, other in zip(tokens, ours, theirs, strict=True) if one > other]
    assert {*differ} <= {end}
    assert bool(differ) == (template == WITHOUT_END)


def test_marks_that_hold_nothing_of_an_answer_are_refused(rows_of: Callable[..., FileRows], renderer_of: Any) -> None:
    around_headers = marked("{% generation %}{% endgeneration %}{{ message.content + '<|im_end|>\\n' }}", "")
    with pytest.raises(BadRows, match=r"messages\[1\]: the chat template marks nothing of this answer"):
        rows_of(says("a?", "one"), renderer=renderer_of(around_headers))


def test_a_default_system_prompt_is_read_and_not_trained(masks: Masks) -> None:
    (found,) = masks(says("a?", "one"), templates.DEFAULT_SYSTEM)
    assert found[0][0].startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\na?")
    assert found[1:] == [(f"one{END}", True)]


def test_an_end_of_turn_that_is_not_eos_is_trained(masks: Masks) -> None:
    (found,) = masks(says("a?", " one \n", "b?", "two"), templates.TRIMMED_HEADERS)
    assert [text for text, trained in found if trained] == ["one<|object_ref_end|>", "two<|object_ref_end|>"]


def test_white_space_that_the_template_writes_around_an_answer_is_trained_with_it(masks: Masks) -> None:
    (found,) = masks(says("a?", "one"), templates.INST)
    assert found == [("<|quad_start|>[INST] a? [/INST]", False), (f" one {END}", True)]


def test_where_nothing_ends_an_answer_eos_does_and_each_turn_is_a_datum(masks: Masks) -> None:
    """The text between turns has no EOS, so the second prompt does not continue the first datum."""
    first, second = masks(says("a?", "one", "b?", "two"), templates.NO_END)
    assert first == [("USER: a?\nASSISTANT:", False), (f" one{END}", True)]
    assert second == [("USER: a?\nASSISTANT: one\nUSER: b?\nASSISTANT:", False), (f" two{END}", True)]


THOUGHT = "<think>\nhm\n</think>\n\none"


def test_thoughts_are_trained_in_the_turn_that_has_them_and_not_read_in_later_ones(masks: Masks) -> None:
    first, second = masks(says("a?", THOUGHT, "b?", "two"), templates.THINKING)
    assert first[-1] == (f"{THOUGHT}{END}", True)
    assert "hm" not in second[0][0]
    assert second[0][0].count(f"one{END}") == 1
    # Behind the last question, this template writes an empty thought, and the model is to write it.
    assert second[-1] == (f"<think>\n\n</think>\n\ntwo{END}", True)


def test_the_rest_of_a_thought_that_the_prompt_opens_is_trained(masks: Masks) -> None:
    row = says("a?", THOUGHT)
    (open_thought,) = masks(row, templates.THINKING, opens_thought=True)
    assert open_thought[0][0].endswith("<think>\n")
    assert open_thought[1:] == [(f"hm\n</think>\n\none{END}", True)]
    (dropped,) = masks(row, templates.DROPS_EVERY_THOUGHT)
    assert dropped == [
        ("<|quad_start|><|box_start|>a?<|box_end|><think>\n", False),
        (f"hm\n</think>\n\none{END}", True),
    ]


TURN_AND_TEXT_END = templates.CHATML.replace(
    "{% endfor %}", "{% endfor %}{% if not add_generation_prompt %}EOS{% endif %}"
)
"""Phi-3: behind the end of the turn and a line break, EOS ends a text that is not continued."""


def test_nothing_behind_the_end_of_a_turn_is_trained(masks: Masks) -> None:
    (found,) = masks(says("a?", "one", "b?", "two"), TURN_AND_TEXT_END.replace("EOS", END))
    assert [text for text, trained in found if trained] == [f"one{END}", f"two{END}"]
    assert found[-1][1]


def test_text_behind_the_end_of_a_turn_is_refused(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> None:
    with pytest.raises(BadRows, match=r"messages\[1\]: the chat template writes 'bye' behind the end of the answer"):
        rows_of(says("a?", "one"), renderer=renderer_of(TURN_AND_TEXT_END.replace("EOS", "bye")))


CLOSES_A_THOUGHT = templates.CHATML.replace(
    "message['content'] +", "('<think></think>' if message.role == 'assistant' else '') + message['content'] +"
).replace(
    "assistant\\n' }}{% endif",
    "assistant\\n' + ('<think></think>' if enable_thinking is false else '<think>\\n') }}{% endif",
)
"""Nemotron 3: an answer without a thought has an empty one in history, and the prompt opens one."""


def test_an_answer_is_not_trained_within_a_thought_that_only_the_prompt_opens(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer], masks: Masks
) -> None:
    reason = r"never closes with </think> the thought .*; chat_template_kwargs may set enable_thinking"
    with pytest.raises(BadRows, match=reason):
        rows_of(says("a?", "one"), renderer=renderer_of(CLOSES_A_THOUGHT))
    row = {**says("a?", "one"), "chat_template_kwargs": {"enable_thinking": False}}
    (found,) = masks(row, CLOSES_A_THOUGHT)
    assert found[0][0].endswith("assistant\n<think></think>")
    assert found[1:] == [(f"one{END}", True)]


def test_a_thought_behind_one_that_the_prompt_has_closed_is_refused(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> None:
    row = {**says("a?", THOUGHT), "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(BadRows, match="begins with <think>, but the template's prompt ends in '<think></think>'"):
        rows_of(row, renderer=renderer_of(CLOSES_A_THOUGHT))


def test_thoughts_go_into_the_field_that_the_template_reads(masks: Masks) -> None:
    """The word `reasoning` is in the text of this template, as in gpt-oss's, which reads `thinking`."""
    template = templates.CHATML.replace("{% for", "reasoning: low {% for", 1).replace(
        "+ message['content']", "+ (message.thinking or '') + message['content']"
    )
    row = {"messages": [*says("a?")["messages"], {"role": "assistant", "content": "one", "reasoning_content": "hm "}]}
    (found,) = masks(row, template)
    assert found[-1] == (f"hm one{END}", True)


def test_an_answer_without_the_thought_that_the_prompt_opens_is_refused(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> None:
    with pytest.raises(BadRows, match=r"messages\[1\].content: never closes with </think>"):
        rows_of(says("a?", "one"), renderer=renderer_of(templates.DROPS_EVERY_THOUGHT))


def test_a_template_whose_beginning_changes_makes_a_datum_of_each_turn(masks: Masks) -> None:
    first, second = masks(
        says("a?", "one", "b?", "two"),
        templates.COUNTS_MESSAGES.replace(
            "messages | length", "messages | length if false else (1 if messages | length < 3 else 2)"
        ),
    )
    assert first[0][0].startswith("1 ")
    assert second[0][0].startswith("2 ")
    assert [run for run in first + second if run[1]] == [(f"one{END}", True), (f"two{END}", True)]


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (templates.CUTS_REPLIES, "a long answer of more than twelve letters"),
        (templates.CHATML.replace("message['content']", "(message.content | replace('one', '1'))"), "one"),
        (templates.COUNTS_MESSAGES.replace("length }} ", "length }}{% if messages | length > 1 %}x{% endif %}"), "one"),
    ],
)
def test_an_answer_that_a_template_changes_is_refused_or_trained_as_written(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer], template: str, answer: str
) -> None:
    try:
        found = rows_of(says("a?", answer), renderer=renderer_of(template)).examples(0)
    except BadRows as error:
        (problem,) = error.problems
        assert problem.field == "messages[1].content"
        assert "changes what it shows" in problem.reason
    else:
        (example,) = found  # type: ignore[misc]
        assert isinstance(example, Example)
        assert trained_texts(example, renderer_of(template).tokenizer) == [f"{answer}{END}"]
        assert template.startswith("{{ messages | length }}{% if")


def test_a_message_that_a_template_leaves_out_is_refused(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> None:
    template = templates.CHATML.replace(
        "{{ '<|im_start|>' + message['role']", "{% if message.role != 'system' %}{{ '<|im_start|>' + message['role']"
    ).replace("+ '\\n' }}{% endfor %}", "+ '\\n' }}{% endif %}{% endfor %}", 1)
    row = {"messages": [{"role": "system", "content": "s"}, *says("a?", "one")["messages"]]}
    with pytest.raises(BadRows, match=r"messages\[0\]: the chat template leaves out this message \(system\)"):
        rows_of(row, renderer=renderer_of(template))


def test_control_tokens_in_texts_are_trained_as_characters(masks: Masks) -> None:
    (found,) = masks(says("a?<|im_end|>", f"one{END}<|im_start|>user two"), templates.CHATML)
    assert found[-1] == (f"one{END}<|im_start|>user two{END}", True)


def test_the_forged_end_of_an_answer_is_no_token(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> None:
    renderer = renderer_of(templates.CHATML)
    (example,) = rows_of(says("a?", f"one{END}two"), renderer=renderer).examples(0)  # type: ignore[misc]
    targets = example.datum.loss_fn_inputs["target_tokens"].tolist()
    end = renderer.tokenizer.convert_tokens_to_ids(END)
    weights = example.datum.loss_fn_inputs["weights"].tolist()
    assert [weight for target, weight in zip(targets, weights, strict=True) if target == end] == [0.0, 1.0]


def test_weights_are_on_the_targets_that_follow_their_positions(
    rows_of: Callable[..., FileRows], renderer_of: Callable[..., Renderer]
) -> None:
    """As in the cookbook: input tokens[:-1], targets tokens[1:], weights[1:]."""
    renderer = renderer_of(templates.CHATML)
    (example,) = rows_of(says("a?", "one"), renderer=renderer).examples(0)  # type: ignore[misc]
    text = f"<|im_start|>user\na?{END}\n<|im_start|>assistant\none{END}"
    tokens = renderer.tokenizer.encode(text, add_special_tokens=False)
    answer = renderer.tokenizer.encode(f"one{END}", add_special_tokens=False)
    inputs = example.datum.loss_fn_inputs
    assert example.datum.model_input.to_ints() == tokens[:-1]
    assert inputs["target_tokens"].tolist() == tokens[1:]
    assert inputs["weights"].tolist() == [0.0] * (len(tokens) - 1 - len(answer)) + [1.0] * len(answer)
    assert (inputs["target_tokens"].dtype, inputs["weights"].dtype) == ("int64", "float32")
