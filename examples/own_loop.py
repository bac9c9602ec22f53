"""The corrections in a training loop of your own: a softmax policy over six levers, judged by a flattering model.

    python examples/own_loop.py [correction]

What it takes are the lines marked with `#<`; the rest is the problem. Seconds on a CPU.
"""

import sys

import numpy as np
import torch

from wmrl_embodied.core import AnchorSchedule, RewardCorrector

CONTEXTS, LEVERS, GROUP, STEPS = 16, 6, 8, 150


def main(correction: str = "wmrl", seed: int = 0) -> float:
    """Train; returns the true success rate at the end."""
    generator, noise = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    truth = torch.rand(CONTEXTS, LEVERS, generator=generator) ** 3  # chance that a lever pays
    logits = torch.zeros(CONTEXTS, LEVERS, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    corrector = RewardCorrector(correction, AnchorSchedule(fraction=0.125), seed)  # <

    def execute(chance):  # dear
        return (torch.rand(chance.shape, generator=generator) < chance).double().numpy()

    def predict(chance):  # cheap, flattering, noisy
        return np.clip(np.sqrt(chance.numpy()) + 0.1 * noise.normal(size=chance.shape), 0, 1)

    for _ in range(STEPS):
        anchors = corrector.choose(CONTEXTS, GROUP)  # <
        chances = logits.softmax(-1)
        lever = torch.multinomial(chances, GROUP, replacement=True, generator=generator)
        chance = truth.gather(1, lever)
        predicted = predict(chance)  # <
        executed = np.full(predicted.shape, np.nan)  # <
        executed[anchors] = execute(chance[anchors])  # <
        corrected = corrector(predicted, executed)  # <
        loss = -(torch.as_tensor(corrected.advantages) * chances.gather(1, lever).log()).mean()  # <
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    success = float((logits.detach().softmax(-1) * truth).sum(-1).mean())
    best = float(truth.max(-1).values.mean())
    print(f"{correction}: success {success:.3f} of at most {best:.3f}, {corrector.executions:,} executions")
    return success


if __name__ == "__main__":
    main(*sys.argv[1:2])
