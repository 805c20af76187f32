"""What the adapters cost, as shares of a training step of the small model, all in one run: `make bench-adapters`.

Overhead is what a step with our adapter takes more than the same step with what stands in its place without us: verl's
vanilla loss with weights, slime's own TIS and prime-rl's default loss (from their published formulas, metrics that they
return included; prime-rl's also without), TRL's own trainer as it is and with its own token TIS. Ours and theirs take
turns; printed are medians of the differences with 95 % bootstrap intervals. Beside it stand absolute times of ours:
for TRL those of our own lines, outside of TRL's methods and the model, and of them the correction's arithmetic on a
Batch that lies ready.

A step is 256 responses of 9 tokens: TRL's own GRPOTrainer, generation by the same bfloat16 copy included, and for
verl, prime-rl and slime the trainer's part alone (forward, backward, AdamW), which is the smaller denominator.
Seconds are the processor's, of one thread, so that a busy machine matters less.
"""

import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.core_algos import get_policy_loss_fn  # pyright: ignore[reportMissingImports]
from verl.workers.config import ActorConfig  # pyright: ignore[reportMissingImports]

from realmodel.adapters import prime_rl_loss, slime_tis
from realmodel.adapters.trl_sampler import CopySampler
from realmodel.adapters.trl_trainer import MismatchGRPOConfig, MismatchGRPOTrainer
from realmodel.adapters.verl_loss import CARRY  # which registers the losses
from realmodel.policy import model as policy
from realmodel.policy import recipes, small, tasks
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS, losses

ROWS, WIDTH, STEPS, ROUNDS = 256, 9, 12, 4


class TrlsOwnTis(GRPOTrainer):
    """TRL with the correction that it has for vLLM, here for a rollout_func: vLLM itself is never asked for."""

    def _generate(self, prompts: list) -> Any:
        self.use_vllm = False
        drawn = super()._generate(prompts)
        self.use_vllm = True
        return drawn

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        self.use_vllm = True
        output = super()._generate_and_score_completions(inputs)
        assert "importance_sampling_ratio" in output
        return output


def trl_steps(trainers: dict[str, tuple[type, type, dict]]) -> dict[str, np.ndarray]:
    """Seconds of each step (generation, scoring, loss, backward), the trainers taking turns; of it the pass at the
    sampler's weights, and what the adapter's own lines take outside of TRL's methods and the model. (steps, 3)
    """
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in trainers}
    for _ in range(ROUNDS):
        for name, (cls, config, settings) in trainers.items():
            seconds[name] += trl_run(cls, config, settings)[2:]
    return {name: np.array(rows) for name, rows in seconds.items()}


def interval(differences: np.ndarray, over: float) -> str:
    """Median of differences and its 95 % bootstrap interval, as shares."""
    draws = np.random.default_rng(0).choice(differences, (2000, len(differences)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975)) / over
    return f"{np.median(differences) / over:+7.2%} ({low:+.2%}, {high:+.2%})"


def trl_run(cls: type, config: type, settings: dict[str, Any]) -> list[tuple[float, float, float]]:
    model, tokenizer = policy.load(small.build(recipes.Recipe()))
    problems = tasks.get("sort8").sample(np.random.default_rng(0), 500, held_out=False)
    data = Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems])
    times: list[tuple[float, float, float]] = []
    passes: list[float] = []
    own: list[float] = []

    def scored_by_trl(self: Any, *args: Any) -> Any:
        start = time.process_time()
        result = scored(self, *args)
        own.append(start - time.process_time())
        return result

    scored = GRPOTrainer._generate_and_score_completions

    class Timed(cls):
        synced_at = -1  # GRPOTrainer has none: CopySampler then loads at every step, as TRL's vLLM does

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if not issubclass(cls, MismatchGRPOTrainer):
                self.synced_at, self.sampler_weights = self.state.global_step, list(self.model.parameters())
            start = time.process_time()
            result = super().training_step(*args, **kwargs)
            times.append((time.process_time() - start, sum(passes), sum(own)))
            passes.clear()
            own.clear()
            return result

        def _log_probs(self, *args: Any) -> Any:  # without gradient: mu
            start = time.process_time()
            result = super()._log_probs(*args)
            own.append(start - time.process_time())
            if not torch.is_grad_enabled():
                passes.append(-own[-1])
            return result

        def _compute_loss(self, *args: Any) -> Any:
            start = time.process_time()
            result = super()._compute_loss(*args)
            own.append(time.process_time() - start)
            return result

        def _generate_and_score_completions(self, *args: Any) -> Any:
            start = time.process_time()
            result = super()._generate_and_score_completions(*args)
            own.append(time.process_time() - start)
            return result

    def right(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(completion_ids, answer, strict=True)
        return [tasks.reward(ids, tokenizer.encode(a), tokenizer.eos_token_id) for ids, a in pairs]

    with TemporaryDirectory() as folder:
        args = config(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            num_generations=8,
            max_completion_length=WIDTH,
            learning_rate=1e-5,
            max_steps=STEPS,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        top_k = settings.get("centre_top_k", 0)
        trainer = Timed(model, right, args, data, processing_class=tokenizer, rollout_func=CopySampler(top_k=top_k))
        GRPOTrainer._generate_and_score_completions = scored_by_trl
        try:
            trainer.train()
        finally:
            GRPOTrainer._generate_and_score_completions = scored
    return times


def trainer_step() -> Callable[[], None]:
    """Forward, backward and AdamW on 256 responses, the loss as plain as can be."""
    model, _ = policy.load(small.build(recipes.Recipe()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(2, 60, (ROWS, 9 + WIDTH))

    def step() -> None:
        logp = policy.log_probs(model, ids, None)[:, 8:-1].gather(-1, ids[:, 9:, None])
        optimizer.zero_grad()
        (-logp.mean()).backward()
        optimizer.step()

    return step


def hooks() -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """Each hook's loss with backward to the log-probabilities: ours, and what stands there without us."""
    rng = torch.Generator().manual_seed(0)
    q = -torch.rand(ROWS, WIDTH, generator=rng) * 3
    old = torch.minimum(q + 0.02 * torch.randn(q.shape, generator=rng), q * 0)
    pi = torch.minimum(old + 0.01 * torch.randn(q.shape, generator=rng), q * 0).requires_grad_()
    advantage, mask = torch.randn(ROWS, 1, generator=rng).expand(q.shape), torch.ones_like(q, dtype=torch.bool)
    config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=ROWS)
    arguments = {"old_log_prob": old, "log_prob": pi, "advantages": advantage, "response_mask": mask, "config": config}

    def verl(name: str, carried: Tensor) -> Callable[[], Tensor]:
        return lambda: get_policy_loss_fn(name)(**arguments, rollout_is_weights=carried)[0]

    inputs = [
        SimpleNamespace(
            trainer_logprobs=pi[i],
            inference_logprobs=q[i],
            advantages=advantage[i],
            loss_mask=mask[i],
            loss_weights=None,
        )
        for i in range(ROWS)
    ]

    def prime(correction: str) -> Callable[[], Tensor]:
        return lambda: torch.stack([prime_rl_loss.loss(part, correction).loss for part in inputs]).sum()

    def prime_default(metrics: bool) -> Tensor:
        sums = []
        for p in inputs:
            log_ratio = p.trainer_logprobs - p.inference_logprobs
            moved = p.trainer_logprobs.exp() - p.inference_logprobs.exp()
            above, below, gains, losses_ = moved > 0.2, moved < -0.2, p.advantages > 0, p.advantages < 0
            dropped = torch.where(gains, above, below)
            kept, out = p.loss_mask & ~dropped, p.loss_mask & dropped
            sums.append((1e-3 * log_ratio**2 * p.loss_mask - p.advantages * log_ratio.exp() * kept).sum())
            if metrics:  # seven means over masks
                kl = log_ratio.exp() - log_ratio - 1
                told = (kl, out), (kl, kept), (dropped, p.loss_mask), (gains & above, p.loss_mask)
                for x, m in (*told, (losses_ & below, p.loss_mask), (gains, out), (losses_, out)):
                    _ = x[m].sum() / m.sum().clamp(min=1)
        return torch.stack(sums).sum()

    pg_loss = -(advantage * (pi - old).exp()).reshape(-1)
    olds, qs, masks = list(old), list(q), [m.int() for m in mask]

    def slime() -> Tensor:
        args = SimpleNamespace(mismatch_correction="tis")
        given = {"pg_loss": pg_loss, "train_log_probs": olds, "rollout_log_probs": qs, "loss_masks": masks}
        return slime_tis.tis(args, **given)[0].sum()

    weight = (old - q).exp().clamp(max=2)

    def slime_own() -> Tensor:
        ratio = (torch.cat(olds) - torch.cat(qs)).exp()
        clamped = ratio.clamp(0, 2)
        _ = [x.clone().detach() for x in (ratio, (clamped != ratio).float(), (ratio - 1).abs())]  # what it returns too
        return (pg_loss * clamped).sum()

    def with_backward(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(loss(), pi, retain_graph=True)[0]

    return {
        "verl loss tis": (with_backward(verl(f"{CARRY}.tis", q)), with_backward(verl("vanilla", weight))),
        "verl loss cis": (with_backward(verl(f"{CARRY}.cis", q)), with_backward(verl("vanilla", weight))),
        "prime-rl loss tis": (with_backward(prime("tis")), with_backward(lambda: prime_default(True))),
        "  its metrics left out": (with_backward(prime("tis")), with_backward(lambda: prime_default(False))),
        "slime tis": (with_backward(slime), with_backward(slime_own)),
    }


def arithmetic(name: str, vocabulary: int = 64) -> Callable[[], Tensor]:
    """The correction and the sum of its loss on a Batch that lies ready, top-k tables included."""
    rng = torch.Generator().manual_seed(0)
    pi, mu, q = (torch.randn(ROWS, WIDTH, vocabulary, generator=rng).log_softmax(-1) for _ in range(3))
    pi.requires_grad_()
    drawn = [x[..., 3] for x in (pi, q, mu)]
    mask, advantage = torch.ones(ROWS, WIDTH, dtype=torch.bool), torch.randn(ROWS, 1, generator=rng)
    batch = Batch(
        drawn[0],
        drawn[1],
        mask,
        advantage,
        drawn[2],
        logp_train_all=pi,
        logp_sync_all=mu,
        logp_rollout_all=q,
    )
    return lambda: losses.reinforce_per_token(batch, CORRECTIONS[name](batch)).sum()


def main() -> None:
    torch.set_num_threads(1)
    step = trainer_step()
    pairs = hooks()
    work = {"step": step, "tis": arithmetic("tis"), "dlc": arithmetic("dlc")} | {
        f"{name}/{i}": f for name, pair in pairs.items() for i, f in enumerate(pair)
    }
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(43):
        for name, f in work.items():
            start = time.process_time()
            f()
            if turn > 2:
                taken[name].append(time.process_time() - start)
    seconds = {name: np.array(values) for name, values in taken.items()}
    whole = float(np.median(seconds["step"]))
    print(f"trainer's part of a step: {whole * 1e3:.1f} ms; hooks above what stands there without them, n = 40")
    for name in pairs:
        ours, theirs = seconds[f"{name}/0"], seconds[f"{name}/1"]
        print(f"  {name:22} {interval(ours - theirs, whole)}; ours {np.median(ours) * 1e3:.2f} ms")
    never, top = {"resync": "never"}, {"centre_top_k": 64}
    trl = trl_steps(
        {
            "GRPOTrainer": (GRPOTrainer, GRPOConfig, {}),
            "its own TIS": (TrlsOwnTis, GRPOConfig, {"vllm_importance_sampling_mode": "token_truncate"}),
            "tis, every": (MismatchGRPOTrainer, MismatchGRPOConfig, {"correction": "tis", "resync": "every"}),
            "tis, never": (MismatchGRPOTrainer, MismatchGRPOConfig, {"correction": "tis"} | never),
            "dlc, V = 64": (MismatchGRPOTrainer, MismatchGRPOConfig, {"correction": "dlc"} | never | top),
        }
    )
    plain, own_tis = (trl[name][:, 0] for name in ("GRPOTrainer", "its own TIS"))
    whole = float(np.median(plain))
    print(f"TRL's step: {whole * 1e3:.1f} ms, n = {len(plain)}; all shares over it")
    print(f"  {'its own TIS':12} step above TRL's {interval(own_tis - plain, whole)}")
    for name, rows in list(trl.items())[2:]:
        step_seconds, passes, own = rows.T
        arithmetic_share = np.median(seconds[name[:3]]) / whole
        print(f"  {name:12} step above TRL's {interval(step_seconds - plain, whole)}", end="")
        print(f", above its own TIS {interval(step_seconds - own_tis, whole)}")
        print(f"  {'':12} our own lines {interval(own, whole)}, of them arithmetic {arithmetic_share:.2%}", end="")
        print(f"; pass at the sampler's weights {np.median(passes) / whole:.1%}")


if __name__ == "__main__":
    main()
