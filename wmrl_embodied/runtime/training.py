"""A training run from its configuration: builds the parts, drives the trainer, judges, logs, checkpoints, resumes.

The method itself is in `core/trainer.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from wmrl_embodied.adapters.embodied import EmbodiedSettings, EmbodiedTask
from wmrl_embodied.adapters.simulator import Perception
from wmrl_embodied.core.anchors import AnchorSchedule
from wmrl_embodied.core.estimators import make_estimator
from wmrl_embodied.core.ledger import Ledger
from wmrl_embodied.core.policy_gradient import UpdateSettings
from wmrl_embodied.core.trainer import Interrupted, Trainer, TrainerSettings
from wmrl_embodied.core.types import Group
from wmrl_embodied.envs.metaworld import ACTION_DIM, PROPRIO_DIM
from wmrl_embodied.envs.pool import SimulatorPool, SimulatorSettings
from wmrl_embodied.envs.rendering import probe
from wmrl_embodied.policies.loading import LoadedPolicy, load_policy
from wmrl_embodied.runtime.evaluate import evaluate
from wmrl_embodied.runtime.limits import check_limits
from wmrl_embodied.runtime.media import film_rollouts
from wmrl_embodied.runtime.run_folder import RunFolder
from wmrl_embodied.runtime.tracking import open_tracker
from wmrl_embodied.world_models.dynamics import DynamicsEnsemble, DynamicsSettings
from wmrl_embodied.world_models.learner import DynamicsLearner, LearnerSettings

RESUMABLE = ("steps", "threads", "wandb", "media", "checkpoint_every", "eval")


def simulator_settings(task: DictConfig, chunk_size: int) -> SimulatorSettings:
    """How the environments of a `task` configuration are built."""
    return SimulatorSettings(
        image_size=task.image_size, horizon=task.chunks * chunk_size, action_repeat=task.action_repeat
    )


def embodied_settings(task: DictConfig) -> EmbodiedSettings:
    """What a `task` configuration attempts."""
    return EmbodiedSettings(
        tasks=tuple(task.tasks),
        chunks=task.chunks,
        train_states=task.train_states,
        groups_at_once=task.groups_at_once,
    )


def check_fit(loaded: LoadedPolicy, task: DictConfig) -> None:
    """Check that a policy sees and does what the environments of a `task` configuration show and expect.

    Raises:
        ValueError: says what differs.
    """
    config = loaded.policy.config
    size = config.image_features[config.image_key].shape[-1]
    if size != task.image_size:
        raise ValueError(f"task.image_size={task.image_size}: the policy was trained on {size} pixels")
    sizes = (config.robot_state_feature.shape[0], config.action_feature.shape[0])
    if sizes != (PROPRIO_DIM, ACTION_DIM):
        raise ValueError(
            f"the policy takes {sizes[0]} numbers of state and gives {sizes[1]} of action; Meta-World has "
            f"{PROPRIO_DIM} and {ACTION_DIM}"
        )


def train(
    config: DictConfig,
    overrides: Sequence[str] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Start a run, or continue one when `config.resume` names it; returns its folder.

    Args:
        config: of `configs/train.yaml`.
        overrides: what was said on the command line; to a resumed run only these few apply.
        should_stop: asked between executions.

    Raises:
        ValueError, OSError, RuntimeError: bad settings, a missing or foreign checkpoint, no rendering, a full disk;
            each with a message that says what to do, before anything is executed where that is possible.
        Interrupted: `should_stop` said so. Everything executed is in the ledger; resume continues.
    """
    resuming = config.resume is not None
    if resuming:
        run = RunFolder.reopen(Path(config.resume))
        config = _with_overrides(run.config, overrides)
        check_limits(config)
        state = run.load_state(run.latest_step())
    else:
        check_limits(config)
        if config.policy.path is None:
            raise ValueError("policy.path=null: name a pretrained_model folder; wmrl-sft writes one")
        run = RunFolder.create(Path(config.output_dir))
    with ExitStack() as stack:
        parts = _Parts(config, run if resuming else None, stack)
        ledger = stack.enter_context(Ledger(run.path / "ledger"))  # one process at a time from here on
        trainer = _trainer(config, parts, ledger, should_stop)
        if resuming:
            _restore(trainer, parts, state, ledger)
            run.cut_back()
            run.config = config
        elif len(ledger):
            raise FileExistsError(
                f"output_dir={run.path} has a ledger of {ledger.executions} executions: choose another folder"
            )
        else:
            _checkpoint(run, parts, trainer)
            run.begin(config)
        try:
            _drive(
                config, run, parts, trainer, should_stop, stack.enter_context(open_tracker(config, run.path))
            )
        except Interrupted as stopped:
            raise Interrupted(f"{stopped}; resume={run.path} continues") from stopped
        return run.path


def _with_overrides(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a run to resume, with what was said on the command line beside `resume=`.

    Raises:
        ValueError: a setting that a run cannot change half-way.
    """
    changes = [text for text in overrides if not text.startswith("resume=")]
    for text in changes:
        if text.split("=")[0].split(".")[0] not in RESUMABLE:
            raise ValueError(f"{text}: a resumed run can change only {', '.join(RESUMABLE)}")
    return OmegaConf.merge(config, OmegaConf.from_dotlist(changes))


class _Parts:
    """Everything that is checked before the run folder is made and before anything is executed."""

    def __init__(self, config: DictConfig, run: RunFolder | None, stack: ExitStack) -> None:
        torch.set_num_threads(config.threads)
        self.settings = TrainerSettings(**config.trainer)
        self.schedule = AnchorSchedule(**config.anchors)
        update = dict(config.policy_update)
        learning_rate = update.pop("learning_rate")
        self.update = UpdateSettings(**update)
        self.estimator = make_estimator(**config.correction)
        embodied = embodied_settings(config.task)
        start = config.policy.path if run is None else str(run.policy_path(run.latest_step()))
        self.loaded = load_policy(start)
        self.reference = (load_policy(str(run.policy_path(0))) if run else self.loaded).reference()
        for policy in (self.loaded.policy, self.reference):
            for name in ("action_std", "noise_correlation"):
                if config.policy[name] is not None:
                    setattr(policy.config, name, config.policy[name])
        check_fit(self.loaded, config.task)
        if self.settings.groups > embodied.train_states * len(embodied.tasks):
            raise ValueError(
                f"trainer.groups={self.settings.groups}: only task.train_states={embodied.train_states} of "
                f"{len(embodied.tasks)} tasks, and no state twice in a step"
            )
        trainable = [p for p in self.loaded.policy.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
        self.learner = _learner(config, self.loaded, embodied)
        probe()
        self.pool = stack.enter_context(
            SimulatorPool(
                simulator_settings(config.task, self.loaded.policy.config.chunk_size), config.task.workers
            )
        )
        self.perception = Perception(self.loaded.policy, self.loaded.preprocessor)
        self.task = EmbodiedTask(embodied, self.pool, self.perception, self.learner, config.seed)


def _learner(config: DictConfig, loaded: LoadedPolicy, embodied: EmbodiedSettings) -> DynamicsLearner | None:
    settings = dict(config.world_model)
    if settings.pop("kind") == "simulator":
        return None
    policy = loaded.policy
    sizes = DynamicsSettings(**{name: settings.pop(name) for name in ("members", "width", "landmarks")})
    model = DynamicsEnsemble(
        policy.config.feature_dim,
        policy.config.robot_state_feature.shape[0],
        policy.trunk.action_shape,
        len(policy.config.vocabulary),
        sizes,
        config.seed,
    )
    return DynamicsLearner(model, embodied.chunks, LearnerSettings(**settings), config.seed)


def _trainer(config: DictConfig, parts: _Parts, ledger: Ledger, should_stop: Callable[[], bool]) -> Trainer:
    return Trainer(
        parts.task,
        parts.loaded.policy,
        parts.reference,
        parts.estimator,
        parts.schedule,
        parts.optimizer,
        ledger,
        parts.settings,
        parts.update,
        config.seed,
        should_stop,
    )


def _drive(
    config: DictConfig,
    run: RunFolder,
    parts: _Parts,
    trainer: Trainer,
    should_stop: Callable[[], bool],
    track: Callable[[dict[str, Any]], None],
) -> None:
    if trainer.step_count == 0:
        _film(config, run, parts, "before")
        _judge(config, run, parts, trainer, should_stop)
    bar = tqdm(
        total=config.steps,
        initial=trainer.step_count,
        desc=f"{config.correction.name}, seed {config.seed}",
        unit="step",
        disable=None,
    )
    with bar:
        while trainer.step_count < config.steps:
            result = trainer.step()
            step = trainer.step_count
            if step == config.steps or (config.eval.every and step % config.eval.every == 0):
                result.metrics["seconds/evaluate"] = _judge(config, run, parts, trainer, should_stop)
            row = {name: _finite(value) for name, value in result.metrics.items()}
            for group in result.executed:
                run.log("pairs", _pair(step, group))
            run.log("metrics", row)
            track(row)
            if step == config.steps or step % config.checkpoint_every == 0:
                _checkpoint(run, parts, trainer)
            bar.update()
            bar.set_postfix(
                executions=trainer.executions, executed_success=row["executed_success"], refresh=False
            )
    _film(config, run, parts, "after")


def _judge(
    config: DictConfig, run: RunFolder, parts: _Parts, trainer: Trainer, should_stop: Callable[[], bool]
) -> float:
    """Evaluate on held-out states and log it; returns the seconds it took."""
    started = time.perf_counter()
    rows = evaluate(
        parts.loaded.policy,
        parts.pool,
        parts.perception,
        config.task.tasks,
        config.eval.states,
        config.task.chunks,
        deterministic=config.eval.deterministic,
        to_the_horizon=config.eval.to_the_horizon,
        seed=config.seed,
    )
    for row in rows:
        run.log("evaluations", {"step": trainer.step_count, "executions": trainer.executions, **row})
        if should_stop():
            raise Interrupted(f"stopped while judging step {trainer.step_count}")
    return time.perf_counter() - started


def _film(config: DictConfig, run: RunFolder, parts: _Parts, when: str) -> None:
    if config.media:
        model = (
            parts.learner.model
            if when == "after" and parts.learner is not None and parts.learner.groups
            else None
        )
        path = run.path / "media" / f"rollouts_{when}.npz"
        tasks = config.task.tasks[:4]
        film_rollouts(
            parts.loaded.policy, parts.pool, parts.perception, tasks, config.task.chunks, path, model
        )


def _checkpoint(run: RunFolder, parts: _Parts, trainer: Trainer) -> None:
    state = {
        "step": trainer.step_count,
        "executions": trainer.executions,
        "imagined": trainer.imagined,
        "optimizer": trainer.optimizer.state_dict(),
        "estimator": trainer.estimator.state_dict(),
        "share_rule": trainer.share_rule.state_dict(),
        "learner": parts.learner.state_dict() if parts.learner is not None else None,
    }
    run.checkpoint(trainer.step_count, parts.loaded.save, state)


def _restore(trainer: Trainer, parts: _Parts, state: dict[str, Any], ledger: Ledger) -> None:
    trainer.step_count = state["step"]
    trainer.executions = state["executions"]
    trainer.imagined = state["imagined"]
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.estimator.load_state_dict(state["estimator"])
    trainer.share_rule.load_state_dict(state["share_rule"])
    if parts.learner is not None and trainer.estimator.uses_predictions:
        for step in range(trainer.step_count):
            parts.learner.remember(list(ledger.groups(step)))
        parts.learner.load_state_dict(state["learner"])


def _pair(step: int, group: Group) -> dict[str, Any]:
    return {
        "step": step,
        "task": group.context.task,
        "index": group.context.index,
        "executed": [_finite(value) for value in group.executed.tolist()],
        "predicted": [_finite(value) for value in group.predicted.tolist()],
        "predicted_variance": [_finite(value) for value in group.predicted_variance.tolist()],
    }


def _finite(value: float | None) -> float | None:
    """For JSON, which has no NaN."""
    return value if value is not None and math.isfinite(value) else None
