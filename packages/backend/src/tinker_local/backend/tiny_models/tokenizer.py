"""A small byte-level BPE tokenizer: Qwen's text split, a family's added tokens, far fewer merges."""

import json
from pathlib import Path
from typing import Any

from tinker_local.backend.tiny_models.marks import NUM_ADDED, VOCAB_SIZE, Marks

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
    """A `tokenizers.Tokenizer` of `VOCAB_SIZE - NUM_ADDED` ids, without the added tokens."""
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
        vocab_size=VOCAB_SIZE - NUM_ADDED,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer=trainer)
    return tokenizer


def write_tokenizer(out: Path, marks: Marks, max_length: int) -> None:
    """Write the tokenizer files of a checkpoint into `out`.

    `max_length`: tokens, the `model_max_length` that `AutoTokenizer` reports.
    """
    from tokenizers import AddedToken, processors

    tokenizer = _train_bpe()
    tokenizer.add_tokens([AddedToken(name, special=special, normalized=False) for name, special in marks.added])
    if any(tokenizer.token_to_id(name) != marks.token_id(name) for name, _ in marks.added):
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} token ids instead of {VOCAB_SIZE}")
    if marks.bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{marks.bos} $A", special_tokens=[(marks.bos, marks.token_id(marks.bos))]
        )

    tokenizer.save(str(out / "tokenizer.json"))
    bpe = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    write_json(out / "vocab.json", bpe["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in bpe["merges"])
    (out / "merges.txt").write_text("#version: 0.2\n" + merges, encoding="utf-8")
    (out / "chat_template.jinja").write_text(marks.chat_template, encoding="utf-8")
    named = (marks.bos, marks.stops[0], marks.pad)
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": marks.tokenizer_class,
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(marks.token_id(name)): {
                    "content": name,
                    "special": special,
                    "normalized": False,
                    "lstrip": False,
                    "rstrip": False,
                    "single_word": False,
                }
                for name, special in marks.added
            },
            "additional_special_tokens": [name for name, special in marks.added if special and name not in named],
            "bos_token": marks.bos,
            "eos_token": marks.stops[0],
            "pad_token": marks.pad,
            "unk_token": None,
            "errors": "replace",
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            **dict(marks.named),
            **({"extra_special_tokens": dict(marks.named)} if marks.named else {}),
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
