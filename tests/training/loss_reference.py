"""The losses in NumPy, written from the documentation's formulas position by position."""

import numpy as np


def reference(
    loss_fn: str,
    logprobs: np.ndarray,
    inputs: dict[str, np.ndarray],
    config: dict[str, float],
    fixed: np.ndarray | None = None,
) -> float:
    """The sum over the positions of one datum, written from the formulas in float64, position by position.

    Inside sg() the logprobs are `fixed`: those at which a derivative is taken.
    """
    fixed = logprobs if fixed is None else fixed
    total = 0.0
    if loss_fn == "gspo":
        marked = [t for t in range(len(logprobs)) if inputs["sequence_ratio_mask"][t]]
        of_sequence = np.exp(sum(fixed[t] - inputs["logprobs"][t] for t in marked) / len(marked))
    if loss_fn == "stable_reinforce":
        sampled = [t for t in range(len(logprobs)) if inputs["sampled"][t]]
        drift = sum(fixed[t] - inputs["logprobs"][t] for t in sampled) / len(sampled)
        kept = 1.0 / config["max_sequence_ratio"] <= np.exp(drift) <= config["max_sequence_ratio"]
        largest = config["max_ratio"]
        for t in sampled:
            ratio = np.exp(logprobs[t] - inputs["logprobs"][t])
            weight = min(np.exp(fixed[t] - inputs["logprobs"][t]), largest) if kept else 0.0
            total -= weight * inputs["advantages"][t] * logprobs[t]
            at = min(ratio, largest)
            total += config["kl_coeff"] * (at - 1 - np.log(at) + (largest - 1) * (np.log(ratio) - np.log(at)))
        return total
    for t in range(len(logprobs)):
        if loss_fn == "cross_entropy":
            total -= inputs["weights"][t] * logprobs[t]
            continue
        advantage = inputs["advantages"][t]
        ratio = np.exp(logprobs[t] - inputs["logprobs"][t])
        if loss_fn == "importance_sampling":
            total -= ratio * advantage
            continue
        if loss_fn == "dro":
            total -= logprobs[t] * advantage - 0.5 * config["beta"] * (logprobs[t] - inputs["logprobs"][t]) ** 2
            continue
        if loss_fn == "gspo":
            ratio = of_sequence * np.exp(logprobs[t]) / np.exp(fixed[t])
        elif loss_fn == "cispo":
            ratio = np.exp(fixed[t] - inputs["logprobs"][t])
        clipped = min(max(ratio, config["clip_low_threshold"]), config["clip_high_threshold"])
        if loss_fn == "cispo":
            total -= clipped * logprobs[t] * advantage
        else:
            total -= min(ratio * advantage, clipped * advantage)
    return total
