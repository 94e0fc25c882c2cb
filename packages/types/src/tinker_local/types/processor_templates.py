"""Which chat template a model that sees has. Needs transformers."""

from collections.abc import Mapping


def processor_template(model: str) -> str | None:
    """The chat template of a folder's or hub name's processor; None if it has none.

    It comes before the tokenizer's, as in transformers and vLLM: Qwen2.5-VL as published has one with images in
    `chat_template.json`, and its language model's, which only joins texts, in `tokenizer_config.json`. Where both are
    in `chat_template.jinja` they are the same.
    """
    from transformers import ProcessorMixin

    try:
        found = ProcessorMixin.get_processor_dict(model)[0].get("chat_template")
    except OSError:  # the model does not exist, or its files cannot be fetched
        return None
    return found.get("default") if isinstance(found, Mapping) else found
