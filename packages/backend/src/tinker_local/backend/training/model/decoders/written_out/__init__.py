"""A decoder with a hand-written forward and backward for frozen weights and trained adapters, without autograd.

Since only adapters are trained, it avoids what autograd cannot: gradients of weights, copies of activations, launches.
`layers.py` loops over layers; a layer is a sequence of blocks (`block.py`), with one file per kind of block.
`take_layers.py` finds the blocks for transformers' modules.
"""
