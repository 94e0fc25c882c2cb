"""What the decoder reads: token embeddings, with image features at the positions that the renderer named."""

from typing import Any

import numpy as np
import torch
from tinker_local.backend.training.families.interface import ImageFeatures
from tinker_local.backend.training.image_features import ImageFeatureCache
from tinker_local.backend.training.loading import LoadedModel
from tinker_local.backend.training.packing import Packed


@torch.no_grad()
def decoder_inputs(loaded: LoadedModel, images: ImageFeatureCache, packed: Packed) -> dict[str, Any]:
    """Keyword arguments of the decoder for one packed row of T positions.

    `inputs_embeds` [1, T, H]; `position_ids` [1, T] or [3, 1, T]; what the family adds. An image pad id that is not at
    an image position is a token like any other: nothing looks for it.
    """
    device, family = loaded.device, loaded.family
    positions = np.concatenate(
        [family.position_ids(loaded.model.config, item.datum.input) for item in packed.items], axis=1
    )
    position_ids = torch.from_numpy(positions).to(device)
    embeds = loaded.model.get_input_embeddings()(torch.from_numpy(packed.token_ids).to(device))
    arguments: dict[str, Any] = {"position_ids": position_ids if len(position_ids) == 1 else position_ids[:, None]}
    if packed.images:
        features = images.features(packed.images)
        image_rows = torch.from_numpy(packed.image_rows).to(device)
        feature_rows = torch.from_numpy(packed.feature_rows).to(device)
        placed = ImageFeatures(
            features.embeds[feature_rows], tuple(level[feature_rows] for level in features.deepstack)
        )
        embeds.index_copy_(0, image_rows, placed.embeds.to(embeds.dtype))
        is_image = torch.zeros(len(embeds), dtype=torch.bool, device=device).index_fill_(0, image_rows, True)
        arguments |= family.decoder_arguments(placed, is_image)
    return {"inputs_embeds": embeds[None], **arguments}
