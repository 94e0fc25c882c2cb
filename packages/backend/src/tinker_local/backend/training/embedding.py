"""The input of the decoder: token embeddings, with image features at the positions that the renderer assigned."""

import numpy as np
import torch
from tinker_local.backend.training.attention import Segments
from tinker_local.backend.training.decoder import PackedRow
from tinker_local.backend.training.image_features import ImageFeatureCache
from tinker_local.backend.training.load_model import LoadedModel
from tinker_local.backend.training.packing import Packed
from tinker_local.backend.training.transfer import to_device


@torch.no_grad()
def packed_row(loaded: LoadedModel, images: ImageFeatureCache, packed: Packed) -> PackedRow:
    """Embed `packed` into one row of T positions. Image positions are explicit: an image pad id elsewhere is an
    ordinary token."""
    device, family = loaded.device, loaded.family
    positions = np.concatenate(
        [family.position_ids(loaded.model.config, item.datum.input) for item in packed.items], axis=1
    )
    position_ids = to_device(positions if len(positions) == 1 else positions[:, None], device)
    embeds = loaded.model.get_input_embeddings()(to_device(packed.token_ids, device))
    segments = Segments(packed.lengths, device)
    if not packed.images:
        return PackedRow(embeds, position_ids, segments)
    features = images.features(packed.images)
    image_rows = to_device(packed.image_rows, device)
    feature_rows = to_device(packed.feature_rows, device)
    embeds.index_copy_(0, image_rows, features.embeds[feature_rows].to(embeds.dtype))
    deepstack = tuple(level[feature_rows] for level in features.deepstack)
    return PackedRow(embeds, position_ids, segments, image_rows, deepstack)
