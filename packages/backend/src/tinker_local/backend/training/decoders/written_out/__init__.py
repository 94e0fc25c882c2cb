"""Forward and backward of a decoder written out for frozen weights and trained adapters, without autograd.

Knowing that only adapters learn, and which, saves what autograd cannot: gradients of weights, copies of activations,
launches. `layers.py` loops over layers; a layer is a sequence of blocks (`block.py`), one file for each kind.
"""
