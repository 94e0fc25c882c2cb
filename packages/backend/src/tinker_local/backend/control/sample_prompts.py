"""Prompts of samples: their images are fetched and rendered in turns, and count until the sample has ended."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinker_local.backend.models.served_models import ServedModel
from tinker_local.backend.options import BackendOptions
from tinker_local.backend.rendering.image_assets import ImageAssets
from tinker_local.backend.rendering.rendered_input import RenderedInput
from tinker_local.backend.rendering.turns_at_places import TurnsAtPlaces
from tinker_local.backend.scheduling.image_turns import ImageTurns
from tinker_local.backend.scheduling.operations import Timeline
from tinker_local.backend.threads import IMAGE_THREADS, RENDERING, RENDERING_IMAGES
from tinker_local.types import ImageChunk, ModelInput

MAX_FETCHED = 8
"""Prompts of an owner that name images, which are being fetched or wait to be rendered."""


class SamplePrompts:
    """Renders the prompts of all samples."""

    def __init__(self, options: BackendOptions) -> None:
        self._images = ImageAssets(options.image_folder, options.image_hosts)
        self._fetched = TurnsAtPlaces(MAX_FETCHED)  # an owner is a place
        self._turns = ImageTurns(IMAGE_THREADS)

    @asynccontextmanager
    async def rendered(
        self, base: ServedModel, owner: str, session_id: str, given: ModelInput, timeline: Timeline
    ) -> AsyncIterator[RenderedInput]:
        """The prompt as the sampler takes it. Until the context ends, the memory of its images counts."""
        if given.names_images:
            async with self._fetched.at(frozenset((owner,))):
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
