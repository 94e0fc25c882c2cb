"""Random weights in a real model's shape that see where colours are, as the tiny model of the preset `mosaic` does."""

from typing import Any

BLOCK = 4
"""Pixels per side of what the tower averages."""
_CONSTANT = 1.0
_CONTENT = 10.0
_EMBEDDING = 0.7
_OTHERS = 0.3
_SHARPNESS = 2.0
ROPE_THETA = 1e3


def lay_out(model: Any) -> None:
    """Change the weights of a Qwen3-VL of `random_model` in place.

    The tower passes on the mean of each colour in blocks of 4x4 pixels, rotated at random; its layers add nothing. The
    embeddings of images share a random vector, and so do those of text; in every layer the key of the first is the
    query of the second. What a layer adds is smaller the more layers there are, as in GPT-2's initialisation, so that
    a picture is not lost on the way. Training teaches what blocks mean.
    """
    import torch

    weights = dict(model.named_parameters())
    hidden = model.config.text_config.hidden_size
    like = weights["lm_head.weight"]
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        image, text = torch.randn(2, hidden, device=like.device)
        _tower(weights, image)
        for name, value in weights.items():
            if "language_model" not in name:
                continue
            if name.endswith("embed_tokens.weight"):
                value.copy_(_EMBEDDING * (torch.randn_like(value, dtype=torch.float32) + text))
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                value.mul_((2 * model.config.text_config.num_hidden_layers) ** -0.5)
            elif name.endswith("q_norm.weight"):
                value.fill_(_SHARPNESS)
            elif name.endswith("k_proj.weight"):
                queries = weights[name.replace("k_proj", "q_proj")]
                heads = torch.randn(len(value), device=value.device).unflatten(
                    0, (-1, model.config.text_config.head_dim)
                )
                group = len(queries) // len(value)
                _answer(value, image, heads.flatten())
                _answer(queries, text, heads.repeat_interleave(group, 0).flatten())


def _tower(weights: dict[str, Any], image: Any) -> None:
    """Blocks of each patch, beside a constant that fixes the variance by which the merger's norm divides; then
    gelu(x) - gelu(-x) = x carries them through the merger."""
    import torch

    visual = {name.split("visual.", 1)[1]: value for name, value in weights.items() if "visual." in name}
    for name, value in visual.items():
        value.fill_(float("norm" in name and name.endswith("weight")))
    filters, offset = visual["patch_embed.proj.weight"], visual["patch_embed.proj.bias"]
    width, colours, frames, side, _ = filters.shape
    per_side = side // BLOCK
    seen = colours * per_side**2
    for index in range(seen):
        block, colour = divmod(index, colours)
        row, column = (BLOCK * number for number in divmod(block, per_side))
        filters[index, colour, :, row : row + BLOCK, column : column + BLOCK] = 1 / (frames * BLOCK**2)
    offset[seen:] = _CONSTANT * (1 - 2 * (torch.arange(width - seen, device=offset.device) % 2))
    first, second = visual["merger.linear_fc1.weight"], visual["merger.linear_fc2.weight"]
    patches = first.shape[1] // width
    out = torch.linalg.qr(torch.randn(len(second), patches * seen, device=second.device))[0]
    for index in range(patches * seen):
        patch, place = divmod(index, seen)
        first[2 * index, patch * width + place] = 1
        first[2 * index + 1, patch * width + place] = -1
    second[:, : 2 * patches * seen : 2] = _CONTENT * out
    second[:, 1 : 2 * patches * seen : 2] = -_CONTENT * out
    visual["merger.linear_fc2.bias"].copy_(_EMBEDDING * image)


def _answer(matrix: Any, vector: Any, result: Any) -> None:
    """Make the matrix small, but for `vector`, of which it now makes `result` over the root of the width."""
    direction = vector / vector.norm()
    small = _OTHERS * matrix.float()
    matrix.copy_(small + (result / len(vector) ** 0.5 - small @ direction).outer(direction))
