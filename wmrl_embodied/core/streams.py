"""How far the executed and the predicted gradient can be trusted, measured on anchor groups, where both are known.

Knows, for each anchor group, one vector per stream; what is made of it is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Kept of every pair of streams: executed with executed, predicted with predicted, executed with predicted.
_PAIRS = ("ee", "pp", "ep")


class StreamMoments:
    """Running moments of the gradient that one anchor group gives, once by executed and once by predicted scores.

    With x_i the weighted advantages of a group times the members' gradients of log-probability, over G: means of
    |e|^2, |p|^2 and e . p, and unbiased estimates of the squared means |E e|^2, |E p|^2, E e . E p from products of
    *different* groups (a U-statistic; the plug-in |mean|^2 would count noise as signal). Older groups fade out.

    Without gradients of the log-probability the members' are taken as orthonormal: then the moments are those of
    the advantages, the means are unknown and count as 0.

    Attributes:
        groups: effective number of groups behind the estimates (Kish).
    """

    def __init__(self, half_life: float = 64.0) -> None:
        """Start empty.

        Args:
            half_life: groups after which an observation counts half.

        Raises:
            ValueError: if it is not positive.
        """
        if not half_life > 0:
            raise ValueError(f"half_life={half_life}: must be above 0 groups")
        self._decay = 2 ** (-1 / half_life)
        self._weight = self._weight_squared = 0.0
        self._first = dict.fromkeys(_PAIRS, 0.0)
        self._second = dict.fromkeys(_PAIRS, 0.0)
        self._sum: dict[str, np.ndarray] | None = None

    def fade(self, groups: int) -> None:
        """Let what was seen count less, as before that many new groups. Once a step, so that their order is nothing."""
        decay = self._decay**groups
        self._weight *= decay
        self._weight_squared *= decay**2
        for pair in _PAIRS:
            self._first[pair] *= decay
            self._second[pair] *= decay**2
        if self._sum is not None:
            self._sum = {name: vector * decay for name, vector in self._sum.items()}

    def observe(
        self,
        executed: np.ndarray,
        predicted: np.ndarray,
        gradient: np.ndarray | None,
        weight: float = 1.0,
    ) -> None:
        """Count one anchor group in; `fade` first.

        Args:
            executed: (G,) advantages by executed scores, 0 for a member without.
            predicted: (G,) advantages by predicted scores of the same members.
            gradient: (G, K) `Trajectory.log_prob_gradient` of the members, or None.
            weight: of the group, 1 / inclusion probability up to a factor.

        Raises:
            ValueError: the gradient has another size than those before.
        """
        size, weight = len(executed), float(weight)  # numpy's float64 is none of JSON's types
        if gradient is None:
            vectors = {"e": executed / size, "p": predicted / size}
        else:
            vectors = {"e": executed @ gradient / size, "p": predicted @ gradient / size}
        self._weight += weight
        self._weight_squared += weight**2
        for pair in _PAIRS:
            product = float(vectors[pair[0]] @ vectors[pair[1]])
            self._first[pair] += weight * product
            self._second[pair] += weight**2 * product
        if gradient is None:
            return
        if self._sum is None:
            self._sum = {name: np.zeros(gradient.shape[1]) for name in vectors}
        for name, vector in vectors.items():
            if vector.shape != self._sum[name].shape:
                raise ValueError(
                    f"log_prob_gradient has {vector.size} components, before it had {self._sum[name].size}"
                )
            self._sum[name] = self._sum[name] + weight * vector

    @property
    def groups(self) -> float:
        """See the class."""
        return self._weight**2 / self._weight_squared if self._weight_squared else 0.0

    @property
    def sees_bias(self) -> bool:
        """Whether the means of the gradients are measured; without gradients of the log-probability they are not."""
        return self._sum is not None and self.groups > 1

    def means(self) -> dict[str, float]:
        """Products of the streams' mean vectors, "ee", "pp" and "ep"; may come out negative where they are small."""
        if not self.sees_bias or self._sum is None:
            return dict.fromkeys(_PAIRS, 0.0)
        different = self._weight**2 - self._weight_squared
        return {
            pair: (float(self._sum[pair[0]] @ self._sum[pair[1]]) - self._second[pair]) / different
            for pair in _PAIRS
        }

    def squared_bias(self) -> float:
        """|E e - E p|^2: how far the predicted stream points elsewhere, however many groups there are."""
        mean = self.means()
        return max(0.0, mean["ee"] + mean["pp"] - 2 * mean["ep"])

    def covariances(self) -> dict[str, float]:
        """Traces of the (co)variances of one group's gradients, "ee", "pp" (not negative) and "ep"."""
        if self._weight == 0:
            return dict.fromkeys(_PAIRS, 0.0)
        mean = self.means()
        traces = {pair: self._first[pair] / self._weight - mean[pair] for pair in _PAIRS}
        return {"ee": max(0.0, traces["ee"]), "pp": max(0.0, traces["pp"]), "ep": traces["ep"]}

    def state_dict(self) -> dict[str, Any]:
        """State in plain lists and numbers, exact through JSON."""
        return {
            "weight": self._weight,
            "weight_squared": self._weight_squared,
            "first": dict(self._first),
            "second": dict(self._second),
            "sum": None
            if self._sum is None
            else {name: vector.tolist() for name, vector in self._sum.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the half-life stays that of the constructor."""
        self._weight, self._weight_squared = state["weight"], state["weight_squared"]
        self._first, self._second = dict(state["first"]), dict(state["second"])
        self._sum = None
        if state["sum"] is not None:
            self._sum = {name: np.array(vector, np.float64) for name, vector in state["sum"].items()}


class GroupCorrelation:
    """Running correlation of predicted and executed scores inside groups, pooled over the latest anchor groups.

    Attributes:
        groups: that differed inside, so far.
    """

    def __init__(self, half_life: float = 64.0) -> None:
        """Start empty; `half_life` groups after which an observation counts half.

        Raises:
            ValueError: if it is not positive.
        """
        if not half_life > 0:
            raise ValueError(f"half_life={half_life}: must be above 0 groups")
        self._decay = 2 ** (-1 / half_life)
        self._moments = dict.fromkeys(_PAIRS, 0.0)
        self.groups = 0

    def observe(self, groups: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Count in (predicted, executed) scores (G,) of the groups of one step, NaN where missing."""
        fade = self._decay ** len(groups)
        self._moments = {pair: value * fade for pair, value in self._moments.items()}
        for predicted, executed in groups:
            both = np.isfinite(predicted) & np.isfinite(executed)
            p, e = predicted[both], executed[both]
            if len(e) < 2 or np.ptp(e) == 0:
                continue
            p, e = p - p.mean(), e - e.mean()
            self.groups += 1
            for pair, value in (("ee", e @ e), ("pp", p @ p), ("ep", e @ p)):
                self._moments[pair] += float(value)

    @property
    def value(self) -> float:
        """In [-1, 1]; 0 while unknown, or where the predictions never differ."""
        product = self._moments["ee"] * self._moments["pp"]
        return float(np.clip(self._moments["ep"] / np.sqrt(product), -1, 1)) if product > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """State in plain numbers, exact through JSON."""
        return {"moments": dict(self._moments), "groups": self.groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the half-life stays that of the constructor."""
        self._moments, self.groups = dict(state["moments"]), int(state["groups"])
