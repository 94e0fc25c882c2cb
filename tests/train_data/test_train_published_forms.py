"""Rows as data sets on the hub have them: what has one reading is read, with the masks of the same rows as messages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import PIL.Image
import pytest
from tinker_local.client.train.examples import Preference
from tinker_local.client.train.foreign_rows import spoken_turns
from tinker_local.client.train.rendering import Renderer
from tinker_local.client.train.rows import FileRows, read_rows

from tests.train_data.conftest import masked

Read = Callable[..., FileRows]


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def data_of(found: Any) -> list[Any]:
    """What is trained of a row, without its place."""
    sides = [found.chosen, found.rejected] if isinstance(found, Preference) else list(found)
    inputs = [side.datum.loss_fn_inputs for side in sides]
    return [
        (side.datum.model_input, each["target_tokens"].tolist(), each["weights"].tolist())
        for side, each in zip(sides, inputs, strict=True)
    ]


ULTRAFEEDBACK = {
    "prompt": "Why is the sky blue?",
    "prompt_id": "f2c5",
    "chosen": [user("Why is the sky blue?"), answer("Air scatters blue light most.")],
    "rejected": [user("Why is the sky blue?"), answer("It reflects the sea.")],
    "messages": [user("Why is the sky blue?"), answer("Air scatters blue light most.")],
    "score_chosen": 8.5,
    "score_rejected": 4.0,
}
PAIR = {
    "prompt": [user("Why is the sky blue?")],
    "chosen": [answer("Air scatters blue light most.")],
    "rejected": [answer("It reflects the sea.")],
}
WHOLE = {name: [*PAIR["prompt"], *PAIR[name]] for name in ("chosen", "rejected")}
CHAT = {"messages": [user("Name a colour."), answer("Red."), user("Another one."), answer("Blue.")]}
HUMAN = [{"from": "human", "value": "Name a colour."}, {"from": "gpt", "value": "Red."}]
TALK = [*HUMAN, {"from": "human", "value": "Another one."}, {"from": "gpt", "value": "Blue."}]
SAID = "\n\nHuman: Why is the sky blue?\n\nAssistant: "

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UltraFeedback binarized": (ULTRAFEEDBACK, PAIR),
    "implicit prompt of messages (TRL)": (WHOLE, PAIR),
    "orpo-dpo-mix": (
        {"source": "a", **WHOLE, "prompt": "Why is the sky blue?", "question": "Why is the sky blue?"},
        PAIR,
    ),
    "prompt of messages, which both sides have again": ({**PAIR, **WHOLE}, PAIR),
    "prompt of messages with answers as texts": (
        {**PAIR, "chosen": "Air scatters blue light most.", "rejected": "It reflects the sea."},
        PAIR,
    ),
    "a text, with answers as messages": ({**PAIR, "prompt": "Why is the sky blue?"}, PAIR),
    "hh-rlhf": (
        {"chosen": f"{SAID}Air scatters blue light most.", "rejected": f"{SAID}It reflects the sea."},
        PAIR,
    ),
    "hh-rlhf of several turns": (
        {
            "chosen": f"{SAID}Hm.\n\nHuman: Well?\n\nAssistant: Air.",
            "rejected": f"{SAID}Hm.\n\nHuman: Well?\n\nAssistant: The sea.",
        },
        {
            "prompt": [user("Why is the sky blue?"), answer("Hm."), user("Well?")],
            "chosen": [answer("Air.")],
            "rejected": [answer("The sea.")],
        },
    ),
    "UltraChat": ({"prompt": "Name a colour.", "prompt_id": "7", **CHAT}, CHAT),
    "a completion that has the prompt again": (
        {"prompt": CHAT["messages"][:3], "completion": CHAT["messages"]},
        {"prompt": CHAT["messages"][:3], "completion": CHAT["messages"][3:]},
    ),
    "a prompt of messages, and a text": (
        {"prompt": CHAT["messages"][:3], "completion": "Blue."},
        {"prompt": CHAT["messages"][:3], "completion": CHAT["messages"][3:]},
    ),
    "a text, and a completion of messages": (
        {"prompt": "Name a colour.", "completion": [answer("Red.")]},
        {"prompt": [user("Name a colour.")], "completion": [answer("Red.")]},
    ),
    "ShareGPT": ({"id": "0", "conversations": TALK}, CHAT),
    "ShareGPT with a system prompt": (
        {"conversations": [{"from": "system", "value": "Be brief."}, *TALK]},
        {"messages": [system("Be brief."), *CHAT["messages"]]},
    ),
    "ShareGPT with a column system (LLaMA-Factory)": (
        {"conversations": TALK, "system": "Be brief.", "tools": "[]"},
        {"messages": [system("Be brief."), *CHAT["messages"]]},
    ),
    "SlimOrca, with weights": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief.", "weight": None},
                {**TALK[0], "weight": 0},
                {**TALK[1], "weight": 0},
                {**TALK[2], "weight": 0},
                {**TALK[3], "weight": 1},
            ]
        },
        {
            "messages": [
                system("Be brief."),
                CHAT["messages"][0],
                {**answer("Red."), "weight": 0},
                *CHAT["messages"][2:],
            ]
        },
    ),
    "OpenAI's messages as conversations": ({"conversations": CHAT["messages"]}, CHAT),
    "lmsys-chat": ({"conversation_id": "9", "model": "m", "conversation": CHAT["messages"], "turn": 2}, CHAT),
    "Alpaca": (
        {"instruction": "Name a colour.", "input": "", "output": "Red.", "text": "Below is an instruction. Red."},
        {"messages": [user("Name a colour."), answer("Red.")]},
    ),
    "Alpaca with an input": (
        {"instruction": "Translate.", "input": "rot", "output": "red"},
        {"messages": [user("Translate.\n\nrot"), answer("red")]},
    ),
    "Alpaca with a history (LLaMA-Factory)": (
        {
            "instruction": "Another one.",
            "input": None,
            "output": "Blue.",
            "system": "Be brief.",
            "history": [["Name a colour.", "Red."]],
        },
        {"messages": [system("Be brief."), *CHAT["messages"]]},
    ),
}


@pytest.mark.parametrize("form", SAME)
def test_a_row_as_it_is_published_is_trained_as_the_same_row_of_messages(rows_of: Read, form: str) -> None:
    published, plain = SAME[form]
    ours = rows_of(published)
    found, raw = ours.examples(0), ours.raw(0)
    wanted = rows_of(plain).examples(0)
    assert isinstance(found, Preference) == isinstance(wanted, Preference)
    assert data_of(found) == data_of(wanted)
    assert raw == published  # what a judge gets


def test_ultrafeedback_as_parquet_is_trained_as_pairs(
    tmp_path: Path, renderer_of: Callable[..., Renderer], rows_of: Read
) -> None:
    datasets.Dataset.from_list([ULTRAFEEDBACK, {**ULTRAFEEDBACK, "prompt_id": "2"}]).to_parquet(tmp_path / "a.parquet")
    rows = read_rows(tmp_path / "a.parquet", renderer=renderer_of(), most_tokens=512)
    assert rows.kind == "preference"
    assert data_of(rows.examples(1)) == data_of(rows_of(PAIR).examples(0))


def test_pictures_of_llava_are_where_the_text_says(
    tmp_path: Path, rows_of: Read, renderer_of: Callable[..., Renderer]
) -> None:
    PIL.Image.new("RGB", (56, 84), "red").save(tmp_path / "red.png")
    rows = rows_of(
        {
            "id": "1",
            "image": "red.png",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat colour?"},
                {"from": "gpt", "value": "Red, not <b>blue</b>."},
            ],
        }
    )
    (example,) = rows.examples(0)  # type: ignore[misc]
    assert masked(example, renderer_of().tokenizer) == [
        ("<|im_start|>user\n<|vision_start|><6><|vision_end|>\nWhat colour?<|im_end|>\n<|im_start|>assistant\n", False),
        ("Red, not <b>blue</b>.<|im_end|>", True),
    ]


def test_a_mark_of_a_picture_without_a_picture_is_text(rows_of: Read, renderer_of: Callable[..., Renderer]) -> None:
    rows = rows_of({"conversations": [{"from": "human", "value": "HTML has <image>?"}, HUMAN[1]]})
    (example,) = rows.examples(0)  # type: ignore[misc]
    assert "HTML has <image>?" in masked(example, renderer_of().tokenizer)[0][0]


@pytest.mark.parametrize(
    "text",
    [
        "Why?",
        "Human: Why?",
        "\n\nAssistant: a\n\nHuman: b",
        "before\n\nHuman: a\n\nAssistant: b",
        "\n\nHuman: a\n\nAssistant: b\n\nHuman: c",
    ],
)
def test_a_text_of_another_form_is_no_conversation(text: str) -> None:
    assert spoken_turns(text) is None


def test_a_prompt_that_both_sides_repeat_is_not_asked_twice(
    rows_of: Read, renderer_of: Callable[..., Renderer]
) -> None:
    """It was: the question stood twice in what the model read."""
    pair = rows_of({**PAIR, **WHOLE}).examples(0)
    assert isinstance(pair, Preference)
    text = masked(pair.chosen, renderer_of().tokenizer)[0][0]
    assert text.count("Why is the sky blue?") == 1


def test_what_is_published_is_a_row_of_json() -> None:
    assert all(json.loads(json.dumps(published)) == published for published, _ in SAME.values())
