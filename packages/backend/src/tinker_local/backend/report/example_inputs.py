"""The inputs of a report, always the same: texts of this project's own, and a drawing for models that see."""

import io

import numpy as np
from tinker_local.backend.models.served_models import Engines
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.training.trainer import TrainDatum
from tinker_local.types import EncodedTextChunk, ImageChunk, ModelInput

TEXTS = (
    "A river that is dammed does not stop. It fills the valley behind the wall, finds the lowest place, and goes on "
    "from there. A person who builds a dam decides where the water goes next, with or without having thought of it.",
    "To measure a room, walk along its longest wall and count your steps; then do it again. If both counts are the "
    "same, trust them. If they differ, the difference says how well you can count, which is worth knowing too.",
    "def mean(numbers):\n    if not numbers:\n        raise ValueError('there are no numbers')\n"
    "    return sum(numbers) / len(numbers)\n\n\nassert mean([1, 2, 6]) == 3\n",
)
PROMPT = "Three things that are easier to break than to mend, each with a reason:\n1."
WIDTH, HEIGHT = 448, 224
"""Of the drawing, in pixels."""


def text_of(engines: Engines, text: str) -> ModelInput:
    """As the model's tokenizer encodes it; without one, the bytes of `text` as token ids."""
    if engines.text is not None:
        return engines.text.prompt(text)
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32) % engines.trainer.vocab_size
    return ModelInput(chunks=(EncodedTextChunk(tokens=ids),))


def with_drawing(engines: Engines, before: str, after: str) -> ModelInput:
    """The drawing between two texts."""
    image = ImageChunk(data=drawing(), format="png")
    return ModelInput(chunks=(*text_of(engines, before).chunks, image, *text_of(engines, after).chunks))


def drawing() -> bytes:
    """A PNG of a disc and a square on a ground that gets lighter to the right."""
    from PIL import Image, ImageDraw

    ground = np.repeat(np.linspace(40, 200, WIDTH, dtype=np.uint8)[None, :, None], HEIGHT, 0)
    image = Image.fromarray(np.repeat(ground, 3, 2))
    draw = ImageDraw.Draw(image)
    draw.ellipse((60, 50, 180, 170), fill=(210, 60, 40))
    draw.rectangle((270, 70, 370, 170), fill=(30, 90, 180))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def examples(engines: Engines, limit: int) -> list[TrainDatum]:
    """`TEXTS`, and the drawing between two of them if the model sees, each of at most `limit` positions, to be trained
    by cross-entropy on all tokens but those of the image. Blocks."""
    inputs = [text_of(engines, text) for text in TEXTS]
    if engines.renderer.takes_images:
        inputs.append(with_drawing(engines, "A drawing: ", TEXTS[0]))
    rendered = [engines.renderer.render(each, "report") for each in inputs]
    return [_datum(each) for each in rendered if each.length <= limit] or [_datum(_begun(rendered[0], limit))]


def _begun(text: RenderedInput, length: int) -> RenderedInput:
    return RenderedInput(text.token_ids[:length])


def _datum(rendered: RenderedInput) -> TrainDatum:
    weights = np.ones(rendered.length, np.float32)
    for placed in rendered.images:
        weights[placed.offset : placed.offset + placed.image.num_tokens] = 0
    shown = RenderedInput(rendered.token_ids[:-1], rendered.images)
    return TrainDatum(shown, rendered.token_ids[1:].astype(np.int64), {"weights": weights[1:]})
