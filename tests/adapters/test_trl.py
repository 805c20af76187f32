"""TRL, the real one, training the small Qwen3 for 20 steps: what it applied against our own loop's functions.

The sampler is a bfloat16 copy that generates with a cache: real numerics, real staleness, but PyTorch's and not vLLM's.
The trainer is in float64, so that what is left between two ways to the same number is not rounding.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from realmodel.adapters.trl_sampler import CopySampler
from realmodel.adapters.trl_trainer import MismatchGRPOConfig, MismatchGRPOTrainer, _ask_vllm_for_top_k, _padded_top
from realmodel.policy import model as policy
from realmodel.policy import tasks
from realmodel.policy.align import Rollout, pad, to_batch, wanted
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS, RESYNCS, EssBelow, losses
from sandbox.errors import BadInput
from sandbox.metrics import ess, sequence_log_weight

STEPS, ROWS, VOCABULARY = 20, 64, 64


@dataclass
class Seen:
    """One optimiser update: TRL's inputs, the weights it started from and the sampler held, what was applied."""

    inputs: dict[str, Tensor]
    live: dict[str, Tensor]
    sampler: list[Tensor]
    synced_at: int
    batch: Batch
    corrected: Any
    gradient: list[Tensor] = field(default_factory=list)


class Watched(MismatchGRPOTrainer):
    """Keeps what happened; the update is untouched."""

    def _compute_loss(self, model, inputs):
        rule, calls = self.correction, []

        def recorded(batch):
            calls.append((batch, rule(batch)))
            return calls[-1][1]

        self.correction = recorded
        live, sampler = policy.snapshot(self.model), [w.clone() for w in self.sampler_weights]
        loss = super()._compute_loss(model, inputs)
        self.correction = rule
        self.seen.append(Seen(dict(inputs), live, sampler, self.synced_at, *calls[0]))
        return loss


class KeepGradient(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        parameters = self.trainer.model.parameters()
        self.trainer.seen[-1].gradient = [p.grad.clone() for p in parameters]


def trainer(folder, tmp_path, cls: type = Watched, top_k: int = 0, **settings) -> Any:
    model, tokenizer = policy.load(folder, torch.float64)
    problems = tasks.get("sort8").sample(np.random.default_rng(0), 200, held_out=False)
    data = Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems])

    def reward(completion_ids, answer, **_):
        pairs = zip(completion_ids, answer, strict=True)
        return [tasks.reward(ids, tokenizer.encode(a), tokenizer.eos_token_id) for ids, a in pairs]

    config = MismatchGRPOConfig(
        **{
            "output_dir": str(tmp_path),
            "per_device_train_batch_size": ROWS,
            "num_generations": 8,
            "max_completion_length": 10,
            "learning_rate": 2e-4,
            "lr_scheduler_type": "constant",
            "max_steps": STEPS,
            "max_grad_norm": 1e9,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
        }
        | settings
    )
    sampler = CopySampler(top_k=top_k)
    made = cls(model, reward, config, data, processing_class=tokenizer, rollout_func=sampler)
    made.sampler, made.seen = sampler, []
    return made


def reference_batch(seen: Seen, folder, sampled: dict) -> Batch:
    """The same rows through our own alignment, evaluated by our own functions at the recorded weights."""
    model, tokenizer = policy.load(folder, torch.float64)
    mu_weights = policy.snapshot(model)
    for (name, _), value in zip(model.named_parameters(), seen.sampler, strict=True):
        mu_weights[name] = value
    mu_weights["lm_head.weight"] = mu_weights["model.embed_tokens.weight"]  # tied
    model.load_state_dict(seen.live)

    def rows(key: str, mask: str) -> list[list[int]]:
        return [x[m.bool()].tolist() for x, m in zip(seen.inputs[key], seen.inputs[mask], strict=True)]

    prompts, responses = rows("prompt_ids", "prompt_mask"), rows("completion_ids", "completion_mask")
    said = [sampled[tuple(p), tuple(r)] for p, r in zip(prompts, responses, strict=True)]
    rollout = Rollout(
        prompts,
        responses,
        [np.array(logp) for logp, _ in said],
        [table for _, table in said] if said[0][1] is not None else None,
        0,
        np.arange(len(prompts)),
        np.ones(len(prompts), bool),
    )
    ids, attention = pad(rollout, tokenizer.pad_token_id)
    request = {"input_ids": ids, "attention_mask": attention, "use_cache": False}
    train = model(**request).logits.log_softmax(-1)
    sync = torch.func.functional_call(model, mu_weights, (), request).logits.detach().log_softmax(-1)
    advantage = seen.inputs["advantages"]
    centre = rollout.logp_all is not None
    rows, columns = wanted(rollout, ids.shape[1], train.shape[-1], centre)
    pi, mu = (x.flatten(0, 1)[rows].gather(-1, columns) for x in (train, sync))
    return to_batch(rollout, ids, advantage, pi, 0, mu, centre), model


def watch_sampler(made) -> dict:
    """(prompt, response) -> what the sampler said of it: drawn log-probabilities, and the table in token order."""
    said: dict = {}
    sampler, call = made.rollout_func, made.rollout_func.__call__

    def recorded(prompts, trainer):
        output = call(prompts, trainer)
        for mine, theirs in zip(sampler.model.parameters(), trainer.sampler_weights, strict=True):
            assert torch.equal(mine, theirs.bfloat16())  # the sampler holds what mu is evaluated at
        for b, (p, r) in enumerate(zip(output["prompt_ids"], output["completion_ids"], strict=True)):
            table = None
            if sampler.top_k == VOCABULARY:
                table = np.zeros((len(r), VOCABULARY), np.float32)
                np.put_along_axis(table, output["top_token_ids"][b].numpy(), output["top_logprobs"][b].numpy(), 1)
            said[tuple(p), tuple(r)] = output["logprobs"][b], table
        return output

    made.rollout_func = recorded
    return said


@pytest.mark.parametrize(
    ("name", "resync", "top_k"), [("tis", "never", 0), ("dlc", "ess_often", VOCABULARY), ("cis", "every", 0)]
)
def test_twenty_steps_apply_our_weights_and_our_gradient(
    folder, tmp_path, monkeypatch, name: str, resync: str, top_k: int
):
    # which steps fall below 1/2 depends on the small model's weights, and so on the machine that built it
    monkeypatch.setitem(RESYNCS, "ess_often", EssBelow(0.9))
    made = trainer(folder, tmp_path, top_k=top_k, correction=name, resync=resync, centre_top_k=top_k or 1)
    made.add_callback(KeepGradient(made))
    said = watch_sampler(made)
    made.train()
    assert len(made.seen) == STEPS
    synced_at, largest_lag, largest_discrepancy = 0, 0.0, 0.0
    for step, seen in enumerate(made.seen):
        assert seen.synced_at == synced_at  # syncs come when our rule, on our ESS, says so
        batch, model = reference_batch(seen, folder, said)
        corrected = CORRECTIONS[name](batch)
        torch.testing.assert_close(
            torch.where(batch.mask, seen.corrected.weight, 0.0),
            torch.where(batch.mask, corrected.weight, 0.0),
            rtol=0,
            atol=1e-6,
            check_dtype=False,
        )
        losses.reinforce(batch, corrected, "fixed").backward()
        ours = torch.cat([p.grad.flatten() for p in model.parameters()])
        theirs = torch.cat([g.flatten() for g in seen.gradient])
        assert (ours - theirs).norm() <= 1e-5 * ours.norm()
        lag = sequence_log_weight(batch, "lag").double().detach()
        largest_lag = max(largest_lag, float(lag.abs().max()))
        largest_discrepancy = max(largest_discrepancy, float(batch.discrepancy.abs().max()))
        if RESYNCS[resync](step + 1 - synced_at, float(ess(lag)), 0.0):
            synced_at = step + 1
    assert largest_discrepancy > 1e-3  # bfloat16 is seen
    assert (largest_lag > 0.1) == (resync != "every")  # and staleness, where there is any
    if name == "dlc":
        assert len({seen.synced_at for seen in made.seen}) > 2


def test_a_centre_over_the_samplers_top_tokens(folder, tmp_path):
    """With k < V the columns are the sampler's most likely tokens, and pi, mu, q are all of those."""
    made = trainer(folder, tmp_path, top_k=6, correction="dlc", resync="never", centre_top_k=5, max_steps=3)
    said = watch_sampler(made)
    made.train()
    seen = made.seen[-1]
    batch, _ = reference_batch(seen, folder, said)
    top = seen.inputs["top_token_ids"]
    assert seen.corrected.centre.shape == (*batch.mask.shape, 5)
    q = seen.batch.logp_rollout_all
    assert (q[..., :-1] >= q[..., 1:])[batch.mask].all()  # most likely first
    model, _ = policy.load(folder, torch.float64)
    model.load_state_dict(seen.live)
    ids = torch.cat([seen.inputs["prompt_ids"], seen.inputs["completion_ids"]], 1)
    attention = torch.cat([seen.inputs["prompt_mask"], seen.inputs["completion_mask"]], 1)
    rows = policy.log_probs(model, ids, attention)[:, -top.shape[1] - 1 : -1].gather(-1, top)
    torch.testing.assert_close(seen.batch.logp_train_all[batch.mask], rows[batch.mask].double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_denominators_are_trls(folder, tmp_path, loss_type: str):
    """Truncation at 3 and PPO's clip on the same inputs, by TRL's own loss and by ours, in two accumulated parts."""
    rule = '{"preset": "trl.token_truncate"}'
    settings = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "loss_type": loss_type}
    made = trainer(folder, tmp_path, correction=rule, resync="never", max_steps=3, **settings)
    made.train()
    model = made.model.train()
    for seen in made.seen[-2:]:
        inputs = seen.inputs
        made.args.epsilon = made.epsilon_low = made.epsilon_high = 0.2
        mu, q = inputs["sync_per_token_logps"], inputs["sampling_per_token_logps"]
        old = inputs["old_per_token_logps"] = mu  # something that is not pi, for both
        ratio = ((old - q) * inputs["completion_mask"]).exp().clamp(max=3)

        def gradient(loss) -> Tensor:
            model.zero_grad()
            loss.backward()
            return torch.cat([p.grad.flatten() for p in model.parameters()])

        ours = gradient(MismatchGRPOTrainer._compute_loss(made, model, inputs))
        made.use_vllm = made.vllm_importance_sampling_correction = True  # so that TRL multiplies by its weights
        theirs = gradient(GRPOTrainer._compute_loss(made, model, inputs | {"importance_sampling_ratio": ratio}))
        made.use_vllm = made.vllm_importance_sampling_correction = False
        assert theirs.norm() > 0
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


def test_several_updates_a_generation_and_evaluation_leave_the_sampler_alone(folder, tmp_path):
    settings = {"per_device_train_batch_size": 32, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    made = trainer(folder, tmp_path, correction="tis", resync="every", max_steps=6, **settings)
    made.train()
    assert [seen.synced_at for seen in made.seen] == [0, 0, 2, 2, 4, 4]  # TRL can only sync before it generates
    lag = [float(seen.batch.lag.detach().abs().max()) for seen in made.seen]
    assert all(x < 1e-5 for x in lag[::2])
    assert all(x > 1e-4 for x in lag[1::2])
    before = made.synced_at, [w.clone() for w in made.sampler_weights]
    made.evaluate(made.train_dataset.select(range(8)))
    assert made.synced_at == before[0]
    assert all(torch.equal(a, b) for a, b in zip(made.sampler_weights, before[1], strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"beta": 0.1}, "beta is 0.1"),
        ({"loss_type": "cispo"}, "loss_type is 'cispo'"),
        ({"top_p": 0.9}, "top_p"),
        ({"vllm_importance_sampling_correction": True}, "a second time"),
        ({"correction": "snis", "steps_per_generation": 2}, "divides by a batch mean"),
        ({"correction": "dcl"}, "unknown correction 'dcl'"),
        ({"resync": '{"preset": "every", "k": 0}'}, "k is 0"),
        ({"correction": "{"}, "is not JSON"),
    ],
)
def test_settings_that_would_change_the_update_are_refused(folder, tmp_path, settings: dict, words: str):
    with pytest.raises(BadInput, match=words):
        trainer(folder, tmp_path, **{"correction": "tis"} | settings)


def test_the_samplers_top_tokens_of_responses_of_several_lengths():
    """Tensors or lists, three of four columns, a batch that is wider than its longest response."""
    values = [[[-0.1, -2.5, -3.0, -9.0]], [[-0.2, -2.0, -4.0, -5.0], [-0.7, -1.0, -2.0, -3.0]]]
    ids = [[[5, 1, 2, 9]], [[7, 3, 8, 0], [4, 6, 5, 2]]]
    for kind in (list, torch.tensor):
        got = _padded_top([kind(v) for v in values], [kind(i) for i in ids], torch.zeros(2, 3), 3)
        logps, top = got["sampling_top_logps"], got["top_token_ids"]
        nothing = [0, 0, 0]
        assert top.tolist() == [[[5, 1, 2], nothing, nothing], [[7, 3, 8], [4, 6, 5], nothing]]
        wanted = [[[-0.1, -2.5, -3.0], nothing, nothing], [[-0.2, -2.0, -4.0], [-0.7, -1.0, -2.0], nothing]]
        torch.testing.assert_close(logps, torch.tensor(wanted))
    with pytest.raises(BadInput, match=r"top_logprobs\[1\] has shape \(2, 4\), expected \(T, 5\)"):
        _padded_top([[[-0.1] * 5], values[1]], [[[0] * 5], ids[1]], torch.zeros(2, 3), 5)


def test_the_example_trains(tmp_path):
    command = [sys.executable, "-m", "realmodel.adapters.examples.trl_grpo", "--max_steps", "2"]
    config = ["--config", "realmodel/adapters/examples/trl_small.yaml", "--output_dir", str(tmp_path)]
    done = subprocess.run([*command, *config], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train_loss" in done.stdout


def test_a_sampler_that_reports_nothing_is_refused(folder, tmp_path):
    made = trainer(folder, tmp_path, correction="tis")
    made.rollout_func = None  # TRL's own generate
    with pytest.raises(BadInput, match="reports no log-probabilities"):
        made.train()
    made = trainer(folder, tmp_path, correction="dlc")
    with pytest.raises(BadInput, match="no top_logprobs"):
        made.train()


def test_trls_vllm_is_asked_for_its_top_tokens_and_synced_by_the_rule(folder, tmp_path):
    """An object with the methods of TRL's VLLMGeneration that we rely on: a real one (vllm 0.22 to 0.31) needs a GPU.

    It answers as vLLM does: by rank, and with the drawn token last where it is none of the top k.
    """
    k = 3
    made = trainer(
        folder, tmp_path, correction="dlc", resync='{"preset": "every", "k": 2}', centre_top_k=k, max_steps=5
    )
    sampler, syncs, asked = CopySampler(top_k=VOCABULARY), [], []

    class Engine:
        logprobs = 0

        def sync_weights(self):
            syncs.append(made.state.global_step)

        def generate(self, prompts, images, num_generations, profiler):
            asked.append(self.logprobs)
            said = sampler(made.processing_class.batch_decode(prompts), made)
            logprobs, ids = [], []
            for drawn, values, tokens in zip(
                said["completion_ids"], said["top_logprobs"], said["top_token_ids"], strict=True
            ):
                rows = [(v[:k], t[:k]) for v, t in zip(values.tolist(), tokens.tolist(), strict=True)]
                for t, token in enumerate(drawn):
                    if token not in rows[t][1]:
                        at = tokens[t].tolist().index(token)
                        rows[t] = ([*rows[t][0], values[t, at].item()], [*rows[t][1], token])
                logprobs.append([v for v, _ in rows])
                ids.append([t for _, t in rows])
            keys = ((tuple(p), tuple(r)) for p, r in zip(prompts, said["completion_ids"], strict=True))
            said_q.update(zip(keys, said["logprobs"], strict=True))
            return prompts, said["completion_ids"], logprobs, ids

    said_q: dict = {}
    made.rollout_func, made.use_vllm, made._last_loaded_step = None, True, -1
    made.vllm_generation = Engine()
    _ask_vllm_for_top_k(made)
    made.train()
    assert syncs == [0, 2, 4]  # TRL alone would have synced at 0, 1, 2, 3 and 4
    assert asked == [k] * 5
    for seen in made.seen:
        assert seen.batch.logp_rollout_all.shape[-1] == k
        q = seen.batch.logp_rollout_all
        assert (q[..., :-1] >= q[..., 1:])[seen.batch.mask].all()
    last = made.seen[-1]
    for b, mask in enumerate(last.batch.mask):
        prompt = last.inputs["prompt_ids"][b][last.inputs["prompt_mask"][b].bool()]
        response = last.inputs["completion_ids"][b][mask]
        said = said_q[tuple(prompt.tolist()), tuple(response.tolist())]
        torch.testing.assert_close(last.batch.logp_rollout[b][mask], torch.tensor(said).double())


def test_two_ranks_sync_together_on_the_ess_of_both(folder, tmp_path):
    """torchrun, gloo: TRL averages gradients over ranks and knows nothing of the ESS."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.adapters.two_processes", str(folder), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert one["synced_at"] == other["synced_at"]
    assert len(set(one["synced_at"])) > 2
    assert one["lag_ess"] == other["lag_ess"]
    for name, value in one["weights"].items():
        assert torch.equal(value, other["weights"][name])
    apart = 0.0
    for update, value in enumerate(one["lag_ess"]):  # two micro-batches an update on each rank
        parts = [torch.cat(rank["log_weights"][2 * update : 2 * update + 2]) for rank in (one, other)]
        assert value == pytest.approx(float(ess(torch.cat(parts))), rel=1e-12)
        apart = max(apart, abs(value - sum(float(ess(part)) for part in parts) / 2))
    assert apart > 1e-3  # the mean of the ranks' own would be another number
