"""The input of the decoder: token embeddings, with image features at the positions that the renderer assigned."""

import numpy as np
import torch
from tinker_local.backend.families.family import ImageFeatures
from tinker_local.backend.training.model.decoder import PackedRow
from tinker_local.backend.training.model.load_model import LoadedModel
from tinker_local.backend.training.model.per_layer import per_layer_embeddings, reads_per_layer
from tinker_local.backend.training.model.segments import NO_PARENT, Segments
from tinker_local.backend.training.model.taken_routes import RowRoutes
from tinker_local.backend.training.routes import RoutedLayers
from tinker_local.backend.training.run.image_features import ImageFeatureCache
from tinker_local.backend.training.run.packing import Part
from tinker_local.backend.training.run.transfer import to_device


@torch.no_grad()
def packed_row(
    loaded: LoadedModel,
    images: ImageFeatureCache,
    part: Part,
    own: ImageFeatures | None = None,
    *,
    gradient: bool = False,
) -> PackedRow:
    """Embed `part` into a row of T positions. Image positions are explicit: an image pad id elsewhere is an ordinary
    token. `own`: the features of `part.own_images`. `gradient`: a backward gives those of image features."""
    device, family = loaded.device, loaded.family
    packed = part.packed
    positions = np.concatenate(
        [
            family.position_ids(loaded.model.config, item.datum.input)[:, item.length - added :]
            for item, added in zip(packed.items, packed.added, strict=True)
        ],
        axis=1,
    )
    positions = np.pad(positions, ((0, 0), (0, part.padding)))[:, part.start : part.stop]
    token_ids = np.pad(packed.token_ids, (0, part.padding))[part.start : part.stop]
    lengths, parents = packed.places.lengths, packed.places.parents
    if part.padding:
        lengths = (*lengths, part.padding)
        parents = (*parents, NO_PARENT) if parents else ()
    position_ids = to_device(positions if len(positions) == 1 else positions[:, None], device)
    embeds = loaded.model.get_input_embeddings()(to_device(token_ids, device))
    vision = family.vision
    whole = vision is not None and vision.whole_images and vision.whole_in(loaded.model.config)
    images_seen = tuple(packed.image_bounds) if whole else ()
    segments = Segments(lengths, device, images_seen, part.shared.or_none, parents)
    per_layer = None
    if reads_per_layer(modules := loaded.model.get_submodule(family.decoder_path)):
        named = token_ids.copy()
        named[part.image_rows] = loaded.model.config.get_text_config().pad_token_id  # as transformers does
        per_layer = per_layer_embeddings(modules, to_device(named, device))
    routes = _row_routes(part, loaded.decoder.routed, device)
    if not part.images and own is None:
        return PackedRow(embeds, position_ids, segments, per_layer=per_layer, routes=routes)
    features = ImageFeatures.joined([*([images.features(part.images)] if part.images else []), *([own] if own else [])])
    image_rows = to_device(part.image_rows, device)
    feature_rows = to_device(part.feature_rows, device)
    embeds.index_copy_(0, image_rows, features.embeds[feature_rows].to(embeds.dtype))
    deepstack = tuple(level[feature_rows] for level in features.deepstack)
    grad_deepstack = tuple(torch.zeros_like(level, dtype=embeds.dtype) for level in deepstack) if gradient else ()
    return PackedRow(
        embeds, position_ids, segments, image_rows, deepstack, grad_deepstack, per_layer, features.after, routes
    )


def _row_routes(part: Part, routed: RoutedLayers | None, device: torch.device) -> RowRoutes | None:
    """The experts that positions of `part` take; None if nothing is recorded of any item of its row."""
    items = part.packed.items
    if routed is None or all(item.datum.routes is None for item in items):
        return None
    rows = [
        routed.unrecorded(added)
        if item.datum.routes is None
        else item.datum.routes.read(item.length - added, item.length)
        for item, added in zip(items, part.packed.added, strict=True)
    ]
    whole = np.concatenate([*rows, routed.unrecorded(part.padding)])
    return RowRoutes(to_device(whole[part.start : part.stop], device), routed.experts)


def own_gradients(part: Part, row: PackedRow, grad_embeds: torch.Tensor) -> ImageFeatures:
    """The gradients of the features of `part.own_images`, summed over the places of each image. `row`: after the
    backward, which gave `grad_embeds` [T, H]."""
    first = sum(image.num_features for image in part.images)
    count = sum(image.num_features for _, image in part.own_images)
    places = np.flatnonzero(part.feature_rows >= first)
    device = grad_embeds.device
    rows = to_device(part.feature_rows[places] - first, device)

    def summed(gradients: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return gradients.new_zeros(count, gradients.shape[1]).index_add_(0, rows, gradients[of])

    levels = to_device(places, device)
    return ImageFeatures(
        summed(grad_embeds, to_device(part.image_rows[places], device)),
        tuple(summed(level, levels) for level in row.grad_deepstack),
        tuple(row.after),
    )
