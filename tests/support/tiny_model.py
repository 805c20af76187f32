"""A tiny Qwen3 with random weights, and slow ways to say what a trainer thinks of a rollout."""

import numpy as np
import torch

from realmodel.policy import model as policy
from realmodel.policy import recipes
from realmodel.policy.align import Rollout

PROMPTS = [[2 + int(d) for d in np.random.default_rng(i).integers(0, 10, 9)] for i in range(8)]


def untrained(seed: int = 0):
    """A Qwen3 whose logits differ by a few nats, unlike a freshly initialised one's."""
    model = recipes.initialise(recipes.Recipe(seed=seed), recipes.char_tokenizer())
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters() if p.ndim == 2}.values():
            parameter.mul_(5)
    return model


def adamw_step(model, learning_rate: float = 1e-4) -> None:
    """One small update on random tokens."""
    ids = torch.randint(2, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    optimiser = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    loss = -policy.log_probs(model, ids, None)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    loss.backward()
    optimiser.step()


def trainer_rows(model, rollout: Rollout) -> list[np.ndarray]:
    """The trainer's whole-vocabulary log-probabilities of each response, one sequence at a time. B arrays (T_i, V)"""
    rows = []
    for prompt, response in zip(rollout.prompt_ids, rollout.response_ids, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0].double()
        rows.append(torch.stack([logits[len(prompt) + t - 1] for t in range(len(response))]).log_softmax(-1).numpy())
    return rows


def disagreement(model, rollout: Rollout) -> np.ndarray:
    """log-probability of every drawn token, trainer minus sampler. (tokens,)"""
    rows = trainer_rows(model, rollout)
    return np.array(
        [
            rows[b][t, token] - rollout.logp[b][t]
            for b, response in enumerate(rollout.response_ids)
            for t, token in enumerate(response)
        ]
    )
