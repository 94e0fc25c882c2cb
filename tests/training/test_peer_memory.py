"""Ranks that read each other's memory, in threads' places: two processes over gloo, on shared memory of the host."""
