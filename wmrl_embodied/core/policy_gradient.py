"""The policy update: clipped surrogate with weighted advantages, KL to a frozen reference, several epochs.

Knows trajectories and one number of advantage for each; where these come from is not its business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from wmrl_embodied.core.types import Policy, Trajectory, collate


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of `update_policy`; the defaults are the published ones where there are any.

    Attributes:
        epochs: passes over the batch.
        minibatch: trajectories per optimiser step, None for all at once. The batch is cut evenly, so that
            no step is left with a few trajectories at full step size.
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: and above at 1 + clip_high; None for clip_low.
        kl_coefficient: weight of the KL to the reference.
        kl_linear_above: the estimate of that KL is exponential in the log-ratio to the reference up to here (nats)
            and linear beyond, since a single decision that the policy would no longer take could otherwise outweigh
            a batch; None as published, exponential throughout.
        max_grad_norm: upper limit of the gradient's norm.
        kl_limit: the update ends before the step whose minibatch has a mean KL(old || new) above this, nats
            per decision; None for no limit.
    """

    epochs: int = 1
    minibatch: int | None = None
    clip_low: float = 0.2
    clip_high: float | None = None
    kl_coefficient: float = 0.04
    kl_linear_above: float | None = None
    max_grad_norm: float = 1.0
    kl_limit: float | None = None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: names the setting, its value and its limits.
        """
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs}: must be at least 1")
        if self.minibatch is not None and self.minibatch < 1:
            raise ValueError(f"minibatch={self.minibatch}: must be at least 1, or null for the whole batch")
        if not 0 < self.clip_low < 1:
            raise ValueError(f"clip_low={self.clip_low}: must be in (0, 1)")
        if self.clip_high is not None and not self.clip_high > 0:
            raise ValueError(f"clip_high={self.clip_high}: must be above 0, or null for clip_low")
        if not self.kl_coefficient >= 0:
            raise ValueError(f"kl_coefficient={self.kl_coefficient}: must be at least 0")
        if self.kl_linear_above is not None and not self.kl_linear_above > 0:
            raise ValueError(f"kl_linear_above={self.kl_linear_above}: must be above 0, or null for no limit")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm}: must be above 0")
        if self.kl_limit is not None and not self.kl_limit > 0:
            raise ValueError(f"kl_limit={self.kl_limit}: must be above 0, or null for no limit")


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """sum(mask * values) / sum(mask), scalar; where the mask is 0 the value is never looked at.

    Args:
        values: (B, T), anything (NaN included) where the mask is 0.
        mask: (B, T) weights in [0, 1].
    """
    # Replaced before arithmetic, because 0 * NaN is NaN. That goes for gradients too: replace NaN where it
    # enters a computation, not only here.
    total = (mask * torch.where(mask > 0, values, 0.0)).sum()
    return total / mask.sum().clamp_min(torch.finfo(mask.dtype).tiny)


def _ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    return torch.exp(torch.where(mask > 0, log_prob - old_log_prob, 0.0))


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> Tensor:
    """Clipped surrogate loss, to be minimised: masked mean of -min(ratio * A, clip(ratio) * A).

    Args:
        log_prob: (B, T) under the policy that learns, nats.
        old_log_prob: (B, T) under the policy that acted, frozen.
        advantage: (B,) one for all decisions of a trajectory, or (B, T).
        mask: (B, T) weights in [0, 1], 0 for padding.
        clip_low: lower clip distance of the ratio from 1.
        clip_high: upper clip distance; None for `clip_low`.

    Returns:
        Scalar. Entries with mask 0 may hold anything, NaN included.
    """
    advantage = advantage[:, None] if advantage.ndim == 1 else advantage
    advantage = torch.where(mask > 0, advantage, 0.0)
    ratio = _ratio(log_prob, old_log_prob, mask)
    clipped = ratio.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    return masked_mean(-torch.minimum(ratio * advantage, clipped * advantage), mask)


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor, linear_above: float | None = None) -> Tensor:
    """Estimate of KL(p || ref) at samples of p, element by element: exp(d) - d - 1 with d = ref - p.

    Unbiased, never negative, and 0 with zero slope where the two agree.

    Args:
        log_prob: log-probabilities under p, any shape, nats.
        ref_log_prob: log-probabilities of the same decisions under ref, same shape.
        linear_above: go on as the tangent for d above this, nats; None for the exponential throughout.
    """
    difference = ref_log_prob - log_prob
    if linear_above is None:
        return torch.expm1(difference) - difference
    near = difference.clamp(max=linear_above)
    return torch.expm1(near) - near + math.expm1(linear_above) * (difference - near)


def update_policy(
    policy: Policy,
    reference: Policy | None,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | np.ndarray | Tensor,
    optimizer: torch.optim.Optimizer,
    settings: UpdateSettings,
    generator: torch.Generator,
) -> dict[str, float]:
    """Improve the policy on one batch of trajectories (arXiv 2608.12564).

    The old log-probabilities are `Trajectory.old_log_prob`, frozen; recomputed at each pass they would make
    the ratio 1 and the clip dead. Reference log-probabilities are computed once per batch. Trajectories whose
    advantage is exactly 0 are dropped before the first forward pass: they would only add KL, at full cost.

    Every optimiser step averages over the decisions of its own minibatch, sum(mask * loss) / sum(mask), so a
    decision weighs by its survival probability and a long trajectory by its length. One minibatch is one
    step; nothing is accumulated over minibatches.

    The policy is put into evaluation mode for the update, and back afterwards: with dropout on, new and old
    log-probabilities would differ before the first step.

    Args:
        policy: the policy that learns; its parameters are those of the optimiser.
        reference: frozen policy; None only with `kl_coefficient=0`.
        trajectories: B of them.
        advantages: (B,) finite; 0 for a trajectory that does not contribute.
        optimizer: over the policy's parameters. Batches are moved to the device of the first of them.
        settings: see `UpdateSettings`.
        generator: CPU generator of the minibatch order.

    Returns:
        {"skipped": 1.0} if no trajectory contributes; with "kl_old" and "stopped_early" if the KL limit was
        exceeded before the first step. Otherwise "skipped" 0, "trajectories", "loss", "surrogate",
        "kl_reference", "kl_old", "clip_fraction", "grad_norm" (means over the optimiser steps; norm before
        clipping), "ratio_max", "first_log_ratio" (largest |log ratio| before the first step; far from 0 it
        means that the policy acted at another temperature, precision or dropout than it learns),
        "epochs_run" (those with at least one step), "optimizer_steps" and "stopped_early".

    Raises:
        ValueError: for a wrong number of advantages, one that is not finite, or a missing reference.
        FloatingPointError: if the loss or the gradient is not finite; that step is not taken.
    """
    advantage = torch.as_tensor(advantages, dtype=torch.float64, device="cpu")
    if advantage.shape != (len(trajectories),):
        raise ValueError(f"advantages {tuple(advantage.shape)}: expected one for each of {len(trajectories)}")
    if not torch.isfinite(advantage).all():
        raise ValueError(
            f"advantages[{int((~torch.isfinite(advantage)).nonzero()[0])}] is not finite: "
            "give 0 to a trajectory without a score"
        )
    if reference is None and settings.kl_coefficient > 0:
        raise ValueError(f"kl_coefficient={settings.kl_coefficient}: needs a reference policy")
    used = [i for i, t in enumerate(trajectories) if advantage[i] != 0 and bool((t.mask > 0).any())]
    if not used:
        return {"skipped": 1.0}
    trajectories, advantage = [trajectories[i] for i in used], advantage[used].float()

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = parameters[0].device
    steps: list[dict[str, float]] = []
    epochs_run, stopped = 0, False
    with _evaluation_mode(policy, reference):
        ref_log_prob = None
        if reference is not None:
            ref_log_prob = _reference_log_probs(reference, trajectories, settings.minibatch, device)
        for epoch, index in _minibatches(len(trajectories), settings, generator):
            batch = _collate([trajectories[i] for i in index], device)
            ref = None
            if ref_log_prob is not None:
                ref = nn.utils.rnn.pad_sequence([ref_log_prob[i] for i in index], batch_first=True)
            loss, measured = _loss(policy, batch, ref, advantage[index].to(device), settings)
            if settings.kl_limit is not None and measured["kl_old"] > settings.kl_limit:
                stopped = True
                break
            measured["grad_norm"] = _step(loss, measured, parameters, optimizer, settings.max_grad_norm)
            steps.append(measured)
            epochs_run = epoch + 1
    if not steps:  # the policy has left the one that acted before the first step
        return {"skipped": 1.0, "stopped_early": 1.0, "kl_old": measured["kl_old"]}
    means = ("loss", "surrogate", "kl_reference", "kl_old", "clip_fraction", "grad_norm")
    return {
        "skipped": 0.0,
        "trajectories": float(len(trajectories)),
        **{name: float(np.mean([step[name] for step in steps])) for name in means},
        "ratio_max": max(step["ratio_max"] for step in steps),
        "first_log_ratio": steps[0]["log_ratio_max"],
        "epochs_run": float(epochs_run),
        "optimizer_steps": float(len(steps)),
        "stopped_early": float(stopped),
    }


def _minibatches(
    count: int, settings: UpdateSettings, generator: torch.Generator
) -> Iterator[tuple[int, list[int]]]:
    """Epoch and member indices of every optimiser step."""
    parts = math.ceil(count / (settings.minibatch or count))
    for epoch in range(settings.epochs):
        for part in torch.randperm(count, generator=generator).tensor_split(parts):
            yield epoch, part.tolist()


def _collate(trajectories: Sequence[Trajectory], device: torch.device) -> dict[str, Tensor]:
    return {name: values.to(device) for name, values in collate(trajectories).items()}


def _log_prob(policy: Policy, batch: dict[str, Tensor]) -> Tensor:
    """(B, T) float32, 0 where the mask is 0, so that no NaN of the padding enters the computation."""
    log_prob, mask = policy.log_prob(batch), batch["mask"]
    if log_prob.shape != mask.shape:
        raise ValueError(
            f"policy.log_prob gave {tuple(log_prob.shape)}, expected (B, T) = {tuple(mask.shape)}"
        )
    return torch.where(mask > 0, log_prob.float(), 0.0)


@torch.no_grad()
def _reference_log_probs(
    reference: Policy, trajectories: Sequence[Trajectory], chunk: int | None, device: torch.device
) -> list[Tensor]:
    """(T,) reference log-probabilities of each trajectory."""
    values: list[Tensor] = []
    chunk = chunk or len(trajectories)
    for start in range(0, len(trajectories), chunk):
        members = trajectories[start : start + chunk]
        padded = _log_prob(reference, _collate(members, device))
        values += [row[: len(t.mask)] for row, t in zip(padded, members, strict=True)]
    return values


def _loss(
    policy: Policy,
    batch: dict[str, Tensor],
    ref_log_prob: Tensor | None,
    advantage: Tensor,
    settings: UpdateSettings,
) -> tuple[Tensor, dict[str, float]]:
    """Loss of one minibatch, and what is logged of it."""
    mask = batch["mask"].float()
    old_log_prob = torch.where(mask > 0, batch["old_log_prob"].float(), 0.0)
    log_prob = _log_prob(policy, batch)
    high = settings.clip_low if settings.clip_high is None else settings.clip_high
    surrogate = clipped_surrogate(log_prob, old_log_prob, advantage, mask, settings.clip_low, high)
    kl_reference = torch.zeros_like(surrogate)
    if ref_log_prob is not None:
        kl_reference = masked_mean(kl_k3(log_prob, ref_log_prob, settings.kl_linear_above), mask)
    loss = surrogate + settings.kl_coefficient * kl_reference
    with torch.no_grad():
        log_ratio = torch.where(mask > 0, log_prob - old_log_prob, 0.0)
        ratio = log_ratio.exp()
        outside = (ratio < 1 - settings.clip_low) | (ratio > 1 + high)
        # The samples are those of the old policy, so this is KL(old || new).
        kl_old = masked_mean(kl_k3(old_log_prob, log_prob), mask)
        measured = {
            "loss": loss,
            "surrogate": surrogate,
            "kl_reference": kl_reference,
            "kl_old": kl_old,
            "clip_fraction": masked_mean(outside.float(), mask),
            "ratio_max": ratio[mask > 0].max(),
            "log_ratio_max": log_ratio.abs().max(),
        }
    return loss, {name: value.item() for name, value in measured.items()}


def _step(
    loss: Tensor,
    measured: dict[str, float],
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
) -> float:
    """Take one optimiser step; returns the gradient's norm before clipping."""
    if not math.isfinite(measured["loss"]):
        terms = ", ".join(f"{name}={value:g}" for name, value in measured.items())
        raise FloatingPointError(f"policy loss is not finite, no step taken: {terms}")
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm).item()
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise FloatingPointError(f"gradient norm is {norm}, no step taken: loss={measured['loss']:g}")
    optimizer.step()
    return norm


@contextmanager
def _evaluation_mode(*models: Policy | None) -> Iterator[None]:
    """Every module in evaluation mode, and each one back in its own mode afterwards."""
    modules = [m for model in models if isinstance(model, nn.Module) for m in model.modules()]
    modes = [m.training for m in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
