"""Sampling with vLLM: the only folder that imports it. `patches.py` lists what it changes or reads inside vLLM."""
