"""The method. Knows no simulator, robot or language model; torch, numpy, scikit-learn and safetensors only."""

from wmrl_embodied.core.advantages import GroupAdvantages, group_advantages
from wmrl_embodied.core.anchors import AnchorSchedule, ShareRule
from wmrl_embodied.core.debias import MonotoneMap, fit_binned, fit_isotonic
from wmrl_embodied.core.denoise import DisagreementWeight, disagreement
from wmrl_embodied.core.estimators import ESTIMATORS, Estimator, Weighted, make_estimator
from wmrl_embodied.core.hooks import AnchoredReward, Corrected, RewardCorrector
from wmrl_embodied.core.judges import JudgePanel, simplex_weights
from wmrl_embodied.core.ledger import Ledger, LedgerBroken, LedgerFull, LedgerLocked
from wmrl_embodied.core.policy_gradient import UpdateSettings, clipped_surrogate, kl_k3, update_policy
from wmrl_embodied.core.seeding import generator, rng
from wmrl_embodied.core.types import Context, Group, Policy, Score, Task, Trajectory, WorldModel, collate

__all__ = [
    "ESTIMATORS",
    "AnchorSchedule",
    "AnchoredReward",
    "Context",
    "Corrected",
    "DisagreementWeight",
    "Estimator",
    "Group",
    "GroupAdvantages",
    "JudgePanel",
    "Ledger",
    "LedgerBroken",
    "LedgerFull",
    "LedgerLocked",
    "MonotoneMap",
    "Policy",
    "RewardCorrector",
    "Score",
    "ShareRule",
    "Task",
    "Trajectory",
    "UpdateSettings",
    "Weighted",
    "WorldModel",
    "clipped_surrogate",
    "collate",
    "disagreement",
    "fit_binned",
    "fit_isotonic",
    "generator",
    "group_advantages",
    "kl_k3",
    "make_estimator",
    "rng",
    "simplex_weights",
    "update_policy",
]
