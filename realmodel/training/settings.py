"""One real-model run as data, RunConfig, and what its updates change, Learner."""

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from realmodel.engine.sampler import EngineConfig
from realmodel.policy import model as policy
from sandbox.corrections import CORRECTIONS, RESYNCS, Correction, Resync, losses
from sandbox.errors import BadInput

LEAST = {"seed": 0, "steps": 1, "prompts": 1, "group": 2, "held_out": 2, "probe": 0, "warmup": 0, "delay": 0}
LEAST |= {"segment": 0, "checkpoint_every": 1, "centre_top": 0, "micro_batch": 0}


@dataclass(frozen=True)
class RunConfig:
    """One real-model run.

    Args:
        model: folder or hub name; "small" (a dense Qwen3) and "small-moe" (a mixture of experts) are built here.
        task, seed, steps: what is learnt, from which random streams, for how many optimiser updates.
        prompts, group: prompts a batch, responses a prompt.
        learning_rate, warmup, betas, max_grad_norm: AdamW with a linear warm-up over `warmup` updates.
        correction, resync: presets by name, or tables that change a preset (sandbox.output.config).
        delay: updates between the drawing of a batch and its use. With resync "every" this is a constant lag.
        segment: tokens that a batch gets at each step of its delay, from the weights the sampler then holds; the rest
            when it is used. 0: all at once, when it is first drawn.
        denominator: of the loss (losses.DENOMINATORS).
        centre_top: tokens over which a centred correction centres the score: the sampler's likeliest at each place; 0:
            the whole vocabulary.
        micro_batch: responses a backward pass; the loss is divided by the counts of the whole batch. 0: all at once.
        checkpointing: keep only each layer's input for the backward pass, and compute the rest again.
        trainer_dtype: of the trainer's matrix products; the weights that AdamW updates are float32 either way.
        probe: responses drawn afresh at every sync, on which the lag's ESS is measured before each update; 0 is off.
        probe_kept: keep the first probe for the whole run: its ESS is of all that the trainer moved since the start.
        held_out: problems on which the pass rate is measured before each update: exactly, or, where a verifier scores
            the task, by one response a problem drawn from the live weights.
        checkpoint_every: steps between checkpoints, from which a killed run can go on.
        engine: how the sampler runs.
    """

    model: str = "small"
    task: str = "sort8"
    seed: int = 0
    steps: int = 50
    prompts: int = 32
    group: int = 8
    learning_rate: float = 1e-4
    warmup: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    correction: Correction = CORRECTIONS["none"]
    resync: Resync = RESYNCS["never"]
    delay: int = 0
    segment: int = 0
    denominator: str = "fixed"
    centre_top: int = 0
    micro_batch: int = 0
    checkpointing: bool = False
    trainer_dtype: Literal["float32", "bfloat16"] = "float32"
    probe: int = 1024
    probe_kept: bool = False
    held_out: int = 512
    checkpoint_every: int = 1
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise BadInput(f"{name} is {getattr(self, name)}, expected at least {least}")
        if not 0 < self.learning_rate <= 1:
            raise BadInput(f"learning_rate is {self.learning_rate}, expected a number above 0 and at most 1")
        if not self.max_grad_norm > 0:
            raise BadInput(f"max_grad_norm is {self.max_grad_norm}, expected a positive number; inf is off")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise BadInput(f"betas is {list(self.betas)}, expected two numbers from 0 to below 1")
        if self.denominator not in losses.DENOMINATORS:
            raise BadInput(f"denominator is {self.denominator!r}, expected one of {', '.join(losses.DENOMINATORS)}")
        if self.trainer_dtype not in ("float32", "bfloat16"):
            raise BadInput(f"trainer_dtype is {self.trainer_dtype!r}, expected float32 or bfloat16")
        if self.engine.kind == "exact" and (self.micro_batch or self.trainer_dtype != "float32"):
            raise BadInput("engine.kind 'exact' needs the trainer's one shape: micro_batch 0 and trainer_dtype float32")
        if self.segment and not self.delay:
            raise BadInput(f"segment is {self.segment} but delay is 0: no batch waits, so none is drawn in pieces")


@dataclass(frozen=True)
class Learner:
    """What an optimiser update changes; `state` and `restore` copy it, so that runs can start from one point."""

    model: nn.Module
    tokenizer: Any
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        return {"model": policy.snapshot(self.model), "optimizer": deepcopy(self.optimizer.state_dict())}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))


def learner(folder: str | Path, config: RunConfig) -> Learner:
    """The trainer's model, its weights in float32, and its AdamW, fresh."""
    model, tokenizer = policy.load(folder)
    if config.trainer_dtype == "bfloat16":
        model.autocast_dtype = torch.bfloat16
    if config.checkpointing:  # transformers checkpoints in training mode alone; these models have no dropout
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=0.0)
    return Learner(model, tokenizer, optimizer)
