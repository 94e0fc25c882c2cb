"""What is trained of a row, in published chat formats, against the tokens of Hugging Face's templates."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tinker_local.client.train.examples import BadRows, Example, Preference
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows, read_rows

from tests.real_tokenizers.conftest import Real, real_one

Messages = Sequence[Mapping[str, Any]]

SYSTEM = {"role": "system", "content": "Answer briefly. 简短。"}
ASKED = {"role": "user", "content": "What is 2²? 👩‍🚀"}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
TEXTS = ("né \u241f 你好", "a  b\n\n", "\tx", "1 2 3", "</s> <|im_end|> <eos>", "{{ x }}", "Ende.", "👩‍🚀", "0" * 40)


def says(answer: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": answer, **more}


def turns(*texts: str) -> list[dict[str, Any]]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., FileRows]:
    def read(tokenizer: Any, *rows: Mapping[str, Any], **settings: Any) -> FileRows:
        path = tmp_path / f"data-{len([*tmp_path.iterdir()])}.jsonl"  # those read before stay as they are
        path.write_text("\n".join(json.dumps(row) for row in rows))
        settings = {"most_tokens": 2048, **settings}
        return read_rows(path, renderer=Renderer(tokenizer, options=settings.pop("options", None)), **settings)

    return read


@pytest.fixture(scope="module")
def smol(small_model: Path) -> Any:
    """The tokenizer of SmolLM2, whose template inserts a system prompt."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_model)


def tokens_of(example: Example) -> tuple[list[int], list[int]]:
    """All tokens, and the places of the trained ones."""
    inputs = example.datum.loss_fn_inputs
    targets = inputs["target_tokens"].tolist()
    tokens = [*example.datum.model_input.to_ints(), int(targets[-1])]
    assert tokens[1:] == targets
    return tokens, [at + 1 for at, weight in enumerate(inputs["weights"].tolist()) if weight]


def trained_runs(example: Example) -> list[tuple[list[int], list[int]]]:
    """For each run of trained tokens, what is before it and the run."""
    tokens, places = tokens_of(example)
    begins = [at for at in places if at - 1 not in places]
    ends = [at + 1 for at in places if at + 1 not in places]
    return [(tokens[:begin], tokens[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def prompts_of(tokenizer: Any, messages: Messages, **asked: Any) -> list[list[int]]:
    """Hugging Face's tokens before each answer."""
    return [
        list(tokenizer.apply_chat_template(list(messages[:at]), add_generation_prompt=True, return_dict=False, **asked))
        for at, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def end_of(tokenizer: Any) -> int:
    """The token behind a plain answer, by Hugging Face's template alone."""
    text = tokenizer.apply_chat_template(turns("a", "zebra"), tokenize=False).partition("zebra")[2]
    return int(tokenizer.encode(text.strip(), add_special_tokens=False)[0])


def check(tokenizer: Any, found: Sequence[Example], messages: Messages, **asked: Any) -> None:
    """Each answer is trained once, behind the tokens of Hugging Face's prompt, and with the end of turn alone."""
    runs = [run for example in found for run in trained_runs(example)]
    assert [before for before, _ in runs] == prompts_of(tokenizer, messages, **asked)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    for (_, tokens), answer in zip(runs, answers, strict=True):
        assert tokens[-1] == end_of(tokenizer)
        assert tokens.count(tokens[-1]) == 1
        said = tokenizer.decode(tokens[:-1], clean_up_tokenization_spaces=False)
        assert said.removeprefix("<think>\n\n</think>\n\n").strip() == answer.strip()


def test_an_answer_is_trained_with_its_end_of_turn_behind_hugging_faces_prompt(
    chatting: Real, read: Callable[..., FileRows]
) -> None:
    messages = [SYSTEM, ASKED, says("four, 你好!")]
    rows = read(chatting.tokenizer, {"messages": messages})
    (found,) = rows.examples(0)  # type: ignore[misc]
    check(chatting.tokenizer, [found], messages)
    tokens, places = tokens_of(found)
    assert places[-1] == len(tokens) - 1  # nothing behind the end of turn
    assert (found.length, found.trained) == (len(tokens), len(places))
    assert rows.lengths(0) == [(found.length, found.trained)]


def test_every_answer_of_a_long_conversation_is_trained_behind_hugging_faces_prompt(
    chatting: Real, read: Callable[..., FileRows]
) -> None:
    draw = random.Random(4)
    talks = [turns(*draw.choices(TEXTS, k=2 * draw.randint(1, 4))) for _ in range(12)]
    rows = read(chatting.tokenizer, *({"messages": talk} for talk in talks))
    for at, talk in enumerate(talks):
        plain = [{**message, "content": message["content"].replace("<", "")} for message in talk]
        if plain == talk:  # Hugging Face makes tokens of the texts of others
            check(chatting.tokenizer, rows.examples(at), talk)  # type: ignore[arg-type]
        runs = [run for example in rows.examples(at) for run in trained_runs(example)]  # type: ignore[union-attr]
        assert len(runs) == len(talk) // 2
        for _, tokens in runs:
            assert tokens.index(end_of(chatting.tokenizer)) == len(tokens) - 1


@pytest.mark.parametrize("name", ["gemma3", "llama3"])
def test_a_template_that_appends_makes_one_datum_of_all_turns(name: str, read: Callable[..., FileRows]) -> None:
    real = real_one(name)
    messages = turns("one?", "1", "two?", "2", "three?", "3")
    (found,) = read(real.tokenizer, {"messages": messages}).examples(0)  # type: ignore[misc]
    check(real.tokenizer, [found], messages)
    whole = real.hf_ids(messages, add_generation_prompt=False)
    tokens, _ = tokens_of(found)
    assert whole[: len(tokens)] == tokens
    assert real.tokenizer.decode(whole[len(tokens) :]).strip() == ""


def test_qwen3_drops_thoughts_of_earlier_turns_so_each_turn_is_a_datum(
    qwen3: Real, read: Callable[..., FileRows]
) -> None:
    """The whole conversation has no thoughts before the last question, where the model wrote them."""
    messages = turns("one?", "<think>\nhm\n</think>\n\n1", "two?", "<think>\nah\n</think>\n\n2")
    found = read(qwen3.tokenizer, {"messages": messages}).examples(0)
    assert len(found) == 2  # type: ignore[arg-type]
    check(qwen3.tokenizer, found, messages)  # type: ignore[arg-type]
    for example, thought in zip(found, ("hm", "ah"), strict=True):  # type: ignore[arg-type]
        ((before, tokens),) = trained_runs(example)
        assert thought in qwen3.tokenizer.decode(tokens)
        assert "think" not in qwen3.tokenizer.decode(before)


def test_qwen3_without_thinking_trains_the_answer_behind_the_empty_thought_of_its_prompt(
    qwen3: Real, read: Callable[..., FileRows]
) -> None:
    messages = turns("one?", "1")
    for row, options in (
        ({"messages": messages}, {"enable_thinking": False}),
        ({"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}, None),
    ):
        (found,) = read(qwen3.tokenizer, row, options=options).examples(0)  # type: ignore[misc]
        check(qwen3.tokenizer, [found], messages, enable_thinking=False)
        assert found.trained == len(qwen3.text_ids("1")) + 1
    with pytest.raises(BadRows, match="begins with <think>, but the template's prompt ends in"):
        read(qwen3.tokenizer, {"messages": turns("a", "<think>\nb\n</think>\n\nc")}, options={"enable_thinking": False})


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_in_a_field_are_trained_as_those_in_the_text(
    qwen3: Real, read: Callable[..., FileRows], field: str
) -> None:
    apart = [ASKED, says("4", **{field: "hm, 你好"})]
    within = [ASKED, says("<think>\nhm, 你好\n</think>\n\n4")]
    rows = read(qwen3.tokenizer, {"messages": apart}, {"messages": within})
    ((one,), (other,)) = (rows.examples(at) for at in (0, 1))  # type: ignore[misc]
    assert tokens_of(one) == tokens_of(other)


@pytest.mark.parametrize("arguments", ['{"city": "Zürich"}', {"city": "Zürich"}], ids=["text", "object"])
def test_calls_and_answers_behind_results_are_trained_and_results_are_not(
    qwen3: Real, read: Callable[..., FileRows], arguments: Any
) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny </tool_response>"}
    messages = [ASKED, says("", tool_calls=[call]), result, says("It is sunny.")]
    rows = read(
        qwen3.tokenizer, {"messages": messages, "tools": TOOLS}, {"messages": messages, "tools": json.dumps(TOOLS)}
    )
    found = rows.examples(0)
    runs = [run for example in found for run in trained_runs(example)]  # type: ignore[union-attr]
    texts = [qwen3.tokenizer.decode(tokens) for _, tokens in runs]
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    assert [text.removeprefix("<think>\n\n</think>\n\n") for text in texts] == [
        f"{written}<|im_end|>",
        "It is sunny.<|im_end|>",
    ]
    mark = qwen3.tokenizer.convert_tokens_to_ids("<tool_call>")
    assert [tokens.count(mark) for _, tokens in runs] == [1, 0]
    closing = qwen3.tokenizer.convert_tokens_to_ids("</tool_response>")
    assert runs[1][0].count(closing) == 1  # that of the template: the one in the result is text
    as_text = [tokens_of(example) for example in rows.examples(1)]  # type: ignore[union-attr]
    assert as_text == [tokens_of(example) for example in found]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["gemma3", "llama3"])
def test_tools_that_a_template_would_leave_out_are_refused(name: str, read: Callable[..., FileRows]) -> None:
    with pytest.raises(BadRows, match="line 1: tools: the chat template of this model has no tools"):
        read(real_one(name).tokenizer, {"messages": [ASKED, says("a")], "tools": TOOLS})


def test_roles_that_a_template_refuses_are_problems_with_its_reason(read: Callable[..., FileRows]) -> None:
    with pytest.raises(BadRows, match="Conversation roles must alternate"):
        read(real_one("gemma3").tokenizer, {"messages": [ASKED, ASKED, says("a")]})


def test_an_answer_of_weight_0_is_read_and_not_trained(chatting: Real, read: Callable[..., FileRows]) -> None:
    messages = [*turns("one?", "1", "two?", "2")]
    messages[1] = {**messages[1], "weight": 0}
    found = read(chatting.tokenizer, {"messages": messages}).examples(0)
    runs = [run for example in found for run in trained_runs(example)]  # type: ignore[union-attr]
    assert [before for before, _ in runs] == prompts_of(chatting.tokenizer, messages)[1:]


def test_the_last_answer_is_what_evaluation_asks_for(chatting: Real, read: Callable[..., FileRows]) -> None:
    messages = turns("one?", "1", "two?", "2, 你好")
    prompt, answer = read(chatting.tokenizer, {"messages": messages}).prompt(0)
    assert prompt.to_ints() == prompts_of(chatting.tokenizer, messages)[-1]
    assert answer.removeprefix("<think>\n\n</think>\n\n") == "2, 你好"


# Texts without a chat template ---------------------------------------------------------------------------------------


def test_a_completion_is_trained_behind_the_prompt_as_a_server_reads_it(
    real: Real, read: Callable[..., FileRows]
) -> None:
    (found,) = read(real.tokenizer, {"prompt": "2 + 2 =", "completion": " four 你好"}).examples(0)  # type: ignore[misc]
    ((before, tokens),) = trained_runs(found)
    assert before == real.text.prompt("2 + 2 =").to_tokens().tolist()
    assert tokens == [*real.text_ids(" four 你好"), real.tokenizer.eos_token_id]


def test_a_completion_that_ends_itself_is_ended_once(real: Real, read: Callable[..., FileRows]) -> None:
    end = real.stops[0]
    (found,) = read(real.tokenizer, {"prompt": "a", "completion": f"b{end}"}).examples(0)  # type: ignore[misc]
    assert tokens_of(found)[0][-2:] == [*real.text_ids("b"), real.tokenizer.convert_tokens_to_ids(end)]


def test_messages_need_a_chat_template(read: Callable[..., FileRows]) -> None:
    with pytest.raises(BadRows, match="this model has no chat template; write prompt and completion as texts"):
        read(real_one("gpt_oss").tokenizer, {"messages": turns("a", "b")})


# Pairs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["prompt apart", "whole conversations", "prompt as text beside them"])
def test_pairs_share_their_prompt_and_train_their_last_answer_alone(
    chatting: Real, read: Callable[..., FileRows], form: str
) -> None:
    before = [*turns("one?", "1"), ASKED]
    row: dict[str, Any] = {"chosen": [*before, says("four")], "rejected": [*before, says("five, 你好")]}
    if form == "prompt apart":
        row = {"prompt": before, "chosen": [says("four")], "rejected": [says("five, 你好")]}
    if form == "prompt as text beside them":
        row["prompt"] = ASKED["content"]
    rows = read(chatting.tokenizer, row)
    pair = rows.examples(0)
    assert rows.kind == "preference"
    assert isinstance(pair, Preference)
    prompt = chatting.hf_ids(before)
    for side, text in ((pair.chosen, "four"), (pair.rejected, "five, 你好")):
        ((given, tokens),) = trained_runs(side)
        assert given == prompt
        assert text in chatting.tokenizer.decode(tokens)
        assert tokens[-1] == end_of(chatting.tokenizer)
    assert rows.lengths(0) == [(side.length, side.trained) for side in (pair.chosen, pair.rejected)]
    assert rows.prompt(0)[0].to_ints() == prompt


def test_pairs_of_texts_share_their_prompt(real: Real, read: Callable[..., FileRows]) -> None:
    pair = read(real.tokenizer, {"prompt": "2 + 2 =", "chosen": " four", "rejected": " five"}).examples(0)
    assert isinstance(pair, Preference)
    (one, other) = (trained_runs(side)[0] for side in (pair.chosen, pair.rejected))
    assert one[0] == other[0] == real.text.prompt("2 + 2 =").to_tokens().tolist()
    assert one[1] == [*real.text_ids(" four"), real.tokenizer.eos_token_id]


def test_a_pair_of_several_turns_that_the_template_rewrites_is_refused(
    qwen3: Real, read: Callable[..., FileRows]
) -> None:
    chosen, rejected = turns("b?", "b", "c?", "c"), turns("b?", "b", "c?", "d")
    row = {"prompt": turns("a?", "a"), "chosen": chosen, "rejected": rejected}
    with pytest.raises(BadRows, match="chosen: the chat template rewrites earlier turns, so its 2 answers do not fit"):
        read(qwen3.tokenizer, row)


# A template that inserts a system prompt -----------------------------------------------------------------------------


def test_the_system_prompt_that_a_template_inserts_is_read_and_not_trained(
    smol: Any, read: Callable[..., FileRows]
) -> None:
    messages = turns("one?", "1", "two?", "2")
    (found,) = read(smol, {"messages": messages}).examples(0)  # type: ignore[misc]
    check(smol, [found], messages)
    tokens, places = tokens_of(found)
    assert "named SmolLM" in smol.decode(tokens[: places[0]])
    assert found.trained == 4


def test_what_does_not_fit_is_never_cut_within_an_answer(smol: Any, read: Callable[..., FileRows]) -> None:
    messages = turns("one?", "1", "two?", "2", "three?", "3 " * 50, "four?", "4")
    row = {"messages": messages}
    ((whole, _),) = read(smol, row).lengths(0)
    firsts = read(smol, {"messages": messages[:4]})
    ((two, _),) = firsts.lengths(0)
    ((three, _),) = read(smol, {"messages": messages[:6]}).lengths(0)
    with pytest.raises(BadRows, match=rf"messages\[5\]: with this answer the row has {three} tokens, at most"):
        read(smol, row, most_tokens=two + 20)
    for room in (two, two + 20):
        short = read(smol, row, most_tokens=room, too_long="shorten")
        assert [tokens_of(each) for each in short.examples(0)] == [tokens_of(each) for each in firsts.examples(0)]  # type: ignore[union-attr]
        assert short.shortened == 1
        assert short.prompt(0)[1] == "2"
    assert len(read(smol, {"messages": messages[:4]}, most_tokens=two)) == 1
    with pytest.raises(
        BadRows, match=rf"messages\[3\]: with this answer the row has {two} tokens, at most {two - 1} fit"
    ):
        read(smol, {"messages": messages[:4]}, most_tokens=two - 1)
    with pytest.raises(BadRows, match=r"messages\[1\]: with this answer"):
        read(smol, row, most_tokens=20, too_long="shorten")
    exact = read(smol, row, most_tokens=whole, too_long="shorten")
    assert (exact.shortened, exact.lengths(0)[0][0]) == (0, whole)
