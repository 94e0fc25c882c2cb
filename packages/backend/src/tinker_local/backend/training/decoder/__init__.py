"""The decoder as this trainer computes it: forward and backward written out, for frozen weights and trained adapters.

autograd is not used. Knowing that only adapters learn, and which adapters, saves what it cannot: gradients of weights,
copies of activations, launches. `decoder.py` is the loop over layers, `layer.py` one layer, `kernels.py` the
operations beside matrix products, `lora_batch.py` the adapters of a micro-batch side by side, `recomputation.py` what
is kept for the backward.
"""
