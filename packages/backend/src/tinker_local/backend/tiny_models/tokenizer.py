"""A small byte-level BPE tokenizer that behaves like Qwen's: same text split, same added tokens, far fewer merges."""

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
"""Token ids in all: 256 bytes, the merges, then the added tokens. Each id below it decodes to something."""

END_OF_TEXT = "<|endoftext|>"
IM_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"

# Name and whether the token is special, in the order of Qwen3's ids. Ordinary ones survive `skip_special_tokens`.
ADDED_TOKENS: tuple[tuple[str, bool], ...] = (
    (END_OF_TEXT, True),
    ("<|im_start|>", True),
    (IM_END, True),
    ("<|object_ref_start|>", True),
    ("<|object_ref_end|>", True),
    ("<|box_start|>", True),
    ("<|box_end|>", True),
    ("<|quad_start|>", True),
    ("<|quad_end|>", True),
    (VISION_START, True),
    (VISION_END, True),
    ("<|vision_pad|>", True),
    (IMAGE_PAD, True),
    (VIDEO_PAD, True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", False),
    ("<|fim_middle|>", False),
    ("<|fim_suffix|>", False),
    ("<|fim_pad|>", False),
    ("<|repo_name|>", False),
    ("<|file_sep|>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
)

ADDED_TOKEN_IDS: dict[str, int] = {
    name: VOCAB_SIZE - len(ADDED_TOKENS) + index for index, (name, _) in enumerate(ADDED_TOKENS)
}

# How Qwen2 and Qwen3 split text before BPE: contractions, words with their leading space, single digits, punctuation
# with its line breaks, white space.
_SPLIT_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Answers of the examples: one token each, with and without a leading space.
DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOUR_WORDS = ("red", "green", "blue", "yellow", "white", "black", "pink", "orange")

_SENTENCES = (
    "user assistant system tool",
    "What is the colour of the square? What is in this image? What digit is this?",
    "The quick brown fox jumps over the lazy dog, and the answer is not in the picture.",
    "Is it a square, a circle or a triangle? yes no yes no",
    "def add(first, second):\n    return first + second\n",
    '{"name": "search", "arguments": {"query": "weather"}}',
    "Grüße, señor! Où est-ce? 你好，世界。",
)
# A word that occurs this often outranks every pair of the sentences, so all its merges are learnt.
_WORD_REPEATS = 64


def _corpus() -> list[str]:
    words = DIGIT_WORDS + COLOUR_WORDS
    return [*_SENTENCES, *(f"{word} {word}" for word in words for _ in range(_WORD_REPEATS))]


def _train_bpe() -> Any:
    """A `tokenizers.Tokenizer` of `VOCAB_SIZE - len(ADDED_TOKENS)` ids, without the added tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer=trainer)
    return tokenizer


def write_tokenizer(out: Path, chat_template: str, max_length: int) -> None:
    """Write the tokenizer files of a Qwen checkpoint into `out`.

    `max_length`: tokens, the `model_max_length` that `AutoTokenizer` reports.
    """
    from tokenizers import AddedToken

    tokenizer = _train_bpe()
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name, special in ADDED_TOKENS])
    if any(tokenizer.token_to_id(name) != token_id for name, token_id in ADDED_TOKEN_IDS.items()):
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} token ids instead of {VOCAB_SIZE}")

    tokenizer.save(str(out / "tokenizer.json"))
    bpe = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    write_json(out / "vocab.json", bpe["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in bpe["merges"])
    (out / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    (out / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(ADDED_TOKEN_IDS[name]): {
                    "content": name,
                    "special": special,
                    "normalized": False,
                    "lstrip": False,
                    "rstrip": False,
                    "single_word": False,
                }
                for name, special in ADDED_TOKENS
            },
            "additional_special_tokens": [
                name for name, special in ADDED_TOKENS if special and name not in (END_OF_TEXT, IM_END)
            ],
            "bos_token": None,
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "errors": "replace",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
