"""Prompts of samples: their images are fetched and rendered in turns, and count until the sample has ended."""

import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from dataclasses import dataclass

from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.rendering.image_assets import ImageAssets
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.scheduling.image_turns import ImageTurns
from tinker_local.backend.scheduling.operations import Timeline
from tinker_local.backend.threads import IMAGE_THREADS, RENDERING, RENDERING_IMAGES, Places, Who
from tinker_local.types import EncodedTextChunk, ImageChunk, InvalidRequestError, ModelInput

MAX_FETCHED = 6
"""Prompts of an owner that name images, which are being fetched or wait to be rendered. A host or folder that does not
answer holds fewer than `image_assets.MAX_PROMPTS` of one owner, so that others can have theirs."""


class SamplePrompts:
    """Renders the prompts of all samples."""

    def __init__(self, options: BackendOptions) -> None:
        self._images = ImageAssets(options.image_folder, options.image_hosts)
        self._fetched = Places(sys.maxsize, MAX_FETCHED)
        self._turns = ImageTurns(IMAGE_THREADS)

    @asynccontextmanager
    async def rendered(
        self, base: ServedModel, owner: str, session_id: str, given: ModelInput, timeline: Timeline
    ) -> AsyncIterator[RenderedInput]:
        """The prompt as the sampler takes it. Until the context ends, the memory of its images counts."""
        if given.names_images:
            async with self._fetched.turn(Who(owner, session_id)):
                async with self._images.turn(given):
                    timeline.enter("fetching")
                    try:
                        given = await self._images.resolved(given, "prompt")
                    finally:
                        timeline.enter("waiting")
                prompt = await self._render(base, owner, session_id, given, timeline)
        else:
            prompt = await self._render(base, owner, session_id, given, timeline)
        try:
            yield prompt
        finally:
            if prompt.images:
                self._turns.drop(owner, prompt)

    async def _render(
        self, base: ServedModel, owner: str, session_id: str, given: ModelInput, timeline: Timeline
    ) -> RenderedInput:
        render = timeline.during("preparing", base.engines.renderer.render)
        if not any(isinstance(chunk, ImageChunk) for chunk in given.chunks):
            return await RENDERING.run(render, given, "prompt")
        async with self._turns.turn(owner, session_id):
            prompt = await RENDERING_IMAGES.run(render, given, "prompt")
            self._turns.keep(owner, prompt)
            return prompt


# Prompts of other APIs ------------------------------------------------------------------------------------------------


_CHUNK = re.compile(r"prompt\.chunks\[(\d+)\](?:\.\w+)?")


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the model reads, and what the client calls it in its request: each image, in order, and the rest."""

    model_input: ModelInput
    field: str
    image_fields: tuple[str, ...] = ()

    def told(self, text: str) -> str:
        """An error's text with the client's fields in place of those of the Tinker API."""
        found = _CHUNK.match(text)
        if found is None:
            return text.removeprefix("sampling_params.")
        before, chunk = self.model_input.chunks[: int(found[1])], self.model_input.chunks[int(found[1])]
        field = self.field
        if not isinstance(chunk, EncodedTextChunk) and self.image_fields:
            field = self.image_fields[sum(not isinstance(each, EncodedTextChunk) for each in before)]
        return field + text[found.end() :]

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Errors of the request inside name the client's fields."""
        try:
            yield
        except InvalidRequestError as error:
            renamed = copy(error)
            renamed.args = (self.told(str(error)),)
            raise renamed from error
