"""The real model's prices: `python -m benchmarks.real` prints ratios within one run, on the small Qwen3.

A trainer step is forward, correction, backward and AdamW on one batch of 32 x 8 stale responses; generation is not in
it. The uncorrected step needs no mu and has none here; DLC's has the forward at the sampler's weights, the centring and
the ESS. Rounds alternate, so that both see the same machine.
"""

import statistics
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from realmodel.engine import sampler, sync
from realmodel.engine.sampler import EngineConfig
from realmodel.policy import model as policy
from realmodel.policy import recipes, small, tasks
from realmodel.policy.align import WHOLE, pad, to_batch
from realmodel.policy.logprobs import log_probs_at
from realmodel.training import train
from realmodel.training.train import RunConfig
from sandbox.corrections import CORRECTIONS, EveryK
from sandbox.metrics import estimators


def seconds(work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main(rounds: int = 15) -> None:
    """Ratio of the steps, seconds of a sync and its verification, and their share of a step of a run."""
    config = RunConfig(steps=8, resync=EveryK(1), probe=0, engine=EngineConfig(dtype="float32"))
    path = small.build(recipes.Recipe())
    llm, learner = sampler.start(path, config.engine), train.learner(path, config)
    problems = tasks.get(config.task).sample(np.random.default_rng(0), config.prompts, held_out=False)
    prompts = [learner.tokenizer.encode(p.prompt) for p in problems]
    whole = sampler.generate(llm, prompts, config.group, 9, seed=0, top=WHOLE)
    drawn = replace(whole, logp_all=None)
    sampled, advantage = policy.snapshot(learner.model), np.random.default_rng(0).normal(size=len(whole.logp))

    def uncorrected() -> None:
        ids, _ = pad(drawn, learner.tokenizer.pad_token_id)
        pi = log_probs_at(learner.model, ids, *train.asked(learner, drawn, ids))
        batch = to_batch(drawn, ids, advantage, pi, 1)
        train.update(config, learner, drawn, batch, CORRECTIONS["none"](batch), 1)

    def dlc() -> None:
        batch = train.evaluate(learner, whole, 1, {0: sampled}, advantage, centre=True)
        estimators.ess(estimators.sequence_log_weight(batch, "lag"))
        train.update(config, learner, whole, batch, CORRECTIONS["dlc"](batch), 1)

    def tis() -> None:
        batch = train.evaluate(learner, drawn, 1, {0: sampled}, advantage)
        train.update(config, learner, drawn, batch, CORRECTIONS["tis"](batch), 1)

    for work in (uncorrected, dlc, tis):
        work()
    times = [[seconds(work) for work in (uncorrected, dlc, tis)] for _ in range(rounds)]
    plain = statistics.median(row[0] for row in times)
    for i, name in ((1, "DLC"), (2, "token TIS, mu measured")):
        print(f"trainer step, {name} over uncorrected: {statistics.median(r[i] / r[0] for r in times):.2f}", end="")
        print(f" (uncorrected {plain * 1e3:.0f} ms)")
    pushed = statistics.median(seconds(lambda: sync.push(llm, learner.model)) for _ in range(rounds))
    verified = []
    for _ in range(rounds):
        sync.push(llm, learner.model)
        verified.append(seconds(lambda: sync.verify(llm, learner.model, prompts[:8])))
    with TemporaryDirectory() as out:
        steps = train.train(config, llm, learner, Path(out) / "run")
    step = float(np.median(steps["seconds"].drop_nulls()))
    check = statistics.median(verified)
    print(
        f"sync {pushed * 1e3:.0f} ms, verification {check * 1e3:.0f} ms, {check / step:.1%} of a step of {step:.2f} s"
    )


if __name__ == "__main__":
    main()
