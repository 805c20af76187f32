"""verl, the real one: its registry, agg_loss, ppo_loss, DataProto, trainer class and configuration, on a CPU.

Not run here, because verl's rollouts need a GPU engine: a whole training. README.md of the adapters has the command.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import hydra
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from realmodel.adapters import verl_loss, verl_sync
from sandbox.batch import Batch
from sandbox.corrections import CORRECTIONS, RESYNCS, Compose, Truncate, losses, presets
from sandbox.errors import BadInput
from sandbox.metrics import ess
from tests.support.reference_frameworks import verl as slow_verl

B, T = 12, 7
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def data(seed: int = 0) -> dict[str, torch.Tensor]:
    """pi (with gradient), old, q, mask and advantage of unequal responses; anything stands where masked."""
    rng = torch.Generator().manual_seed(seed)
    q = -torch.rand(B, T, generator=rng).double() * 3 - 0.05
    old = torch.minimum(q + 0.6 * torch.randn(B, T, generator=rng), torch.tensor(-1e-3))
    pi = torch.minimum(old + 0.4 * torch.randn(B, T, generator=rng), torch.tensor(-1e-3))
    lengths = torch.tensor([7, 1, 4, 7, 2, 3, 6, 5, 7, 0, 2, 1])  # one response without a token: verl's padding
    mask = (torch.arange(T) < lengths[:, None]).long()
    q[mask == 0] = float("nan")
    advantage = torch.randn(B, 1, generator=rng).double().expand(B, T).clone()
    return {"log_prob": pi.requires_grad_(), "old": old, "q": q, "mask": mask, "advantage": advantage}


def actor(mode: str = "token-mean", loss_mode: str = "vanilla") -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        loss_agg_mode=mode,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode),
    )


def call(name: str, d: dict, config: ActorConfig):
    return core_algos.get_policy_loss_fn(name)(
        old_log_prob=d["old"],
        log_prob=d["log_prob"],
        advantages=d["advantage"],
        response_mask=d["mask"],
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=d["q"],
    )


def gradient(loss: torch.Tensor, d: dict) -> torch.Tensor:
    (result,) = torch.autograd.grad(loss, d["log_prob"], retain_graph=True)
    return result


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tis", "seq_tis", "icepop", "cis", "opsm"])
def test_registered_losses_are_ours_through_verls_agg_loss(name: str, mode: str):
    d = data()
    loss, _ = call(f"mismatch.{name}", d, actor(mode))
    mask = d["mask"].bool()
    batch = Batch(d["log_prob"], d["q"], mask, d["advantage"], d["old"], d["old"])
    corrected = CORRECTIONS.get(name, presets.PRESETS[name])(batch)
    weight = torch.where(mask & corrected.keep, corrected.weight, 0.0)
    n = d["mask"].sum(-1, keepdim=True)
    live = (n > 0).sum()
    divided = {
        "token-mean": weight / n.sum(),
        "token-sum": weight,
        "seq-mean-token-sum": weight / live,
        "seq-mean-token-mean": weight / n.clamp(min=1) / live,
        "seq-mean-token-sum-norm": weight / live / T,
    }[mode]
    torch.testing.assert_close(gradient(loss, d), -divided * d["advantage"], rtol=1e-7, atol=1e-12)
    if mode == "token-mean":
        ours = losses.reinforce(batch, corrected, "fixed")
        torch.testing.assert_close(gradient(loss, d), gradient(ours, d), rtol=1e-12, atol=0)


def test_a_rule_of_ones_own_takes_lag_and_discrepancy_apart():
    rule = Compose((Truncate(on="lag", cap=1.1), Truncate(on="discrepancy", cap=1.3)))
    core_algos.register_policy_loss("mismatch.mine")(verl_loss.policy_loss(rule))
    d = data()
    loss, _ = call("mismatch.mine", d, actor("token-sum"))
    mu = d["old"]
    weight = (d["log_prob"].detach() - mu).exp().clamp(max=1.1) * (mu - d["q"]).exp().clamp(max=1.3)
    weight = torch.where(d["mask"].bool(), weight, 0.0)
    torch.testing.assert_close(gradient(loss, d), -weight * d["advantage"], rtol=1e-9, atol=1e-12)
    with pytest.raises(BadInput, match="centres the score"):
        verl_loss.policy_loss(CORRECTIONS["dlc"])


def test_global_batch_info_makes_micro_batches_add_up():
    """Two halves, each told the global number of tokens and of ranks, as verl's engine tells them."""
    d = data()
    config = actor()
    config.global_batch_info.update(dp_size=2, batch_num_tokens=int(d["mask"].sum()), global_batch_size=B)
    halves = [{k: v[rows] for k, v in d.items()} for rows in (slice(0, 5), slice(5, B))]
    parts = [call("mismatch.tis", half, config)[0] for half in halves]
    whole, _ = call("mismatch.tis", d, actor())
    torch.testing.assert_close(sum(parts) / 2, whole, rtol=1e-12, atol=0)  # FSDP averages over the two ranks


def through_ppo_loss(d: dict, config: ActorConfig, **fields):
    """verl's own caller in the worker: nested tensors, selected fields, metrics."""
    mask = d["mask"].bool()
    lengths = d["mask"].sum(-1).tolist()
    rows = [i for i, n in enumerate(lengths) if n]

    def nested(x: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor([x[i, : lengths[i]] for i in rows], layout=torch.jagged)

    prompts = torch.nested.as_nested_tensor([torch.ones(2, dtype=torch.long) for _ in rows], layout=torch.jagged)
    responses = nested(torch.ones_like(d["mask"]))
    sequences = [torch.cat([torch.ones(2, dtype=torch.long), r]) for r in responses.unbind()]
    batch = TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.nested.as_nested_tensor(sequences, layout=torch.jagged),
            "response_mask": nested(d["mask"]),
            "old_log_probs": nested(d["old"]),
            "advantages": nested(d["advantage"]),
            **{name: nested(value) for name, value in fields.items()},
        },
        batch_size=len(rows),
    )
    total = int(mask.sum())
    tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=total, global_batch_size=len(rows), max_response_len=T)
    # the model speaks of sequences, where row i predicts token i + 1: rows 1 to n are the response's, n its length
    end = d["log_prob"].new_zeros(1)
    flat = [torch.cat([end, d["log_prob"][i, : lengths[i]], end]) for i in rows]
    output = {"log_probs": torch.nested.as_nested_tensor(flat, layout=torch.jagged)}
    return ppo_loss(config, output, batch)


def test_the_worker_reaches_our_loss_with_log_q():
    d = data()
    loss, metrics = through_ppo_loss(d, actor(loss_mode="mismatch.cis"), rollout_is_weights=d["q"])
    direct, _ = call("mismatch.cis", d, actor())
    torch.testing.assert_close(gradient(loss, d), gradient(direct, d), rtol=1e-6, atol=1e-9)
    assert metrics["mismatch/weight"].aggregate() > 0
    with pytest.raises(BadInput, match="rollout_is=mismatch"):
        through_ppo_loss(d, actor(loss_mode="mismatch.cis"))


def test_verl_does_not_know_what_its_hook_cannot_express():
    for name in ("dlc", "seq_dlc", "snis", "slime.mis"):
        with pytest.raises(ValueError, match="Unsupported loss mode"):
            core_algos.get_policy_loss_fn(f"mismatch.{name}")


def proto(d: dict) -> DataProto:
    return DataProto.from_dict(
        tensors={"old_log_probs": d["old"], "rollout_log_probs": d["q"], "response_mask": d["mask"]}
    )


def driver(d: dict, **settings) -> tuple[DataProto, dict]:
    """As verl's trainers call it: by the name they bound."""
    return trainer_base.compute_rollout_correction_and_add_to_batch(proto(d), RolloutCorrectionConfig(**settings))


def test_driver_weights_are_verls_own_where_the_rule_is():
    """Our `verl.` presets made by the driver against verl's own function, rejection by weight 0 instead of the mask."""
    d = data()
    d["q"] = torch.where(d["mask"].bool(), d["q"], 0.0)
    for name in ("decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop"):
        ours, _ = driver(d, rollout_is=f"mismatch.verl.{name}")
        own = getattr(RolloutCorrectionConfig, name)()
        theirs, metrics = verl_loss.VERL_CORRECTION(proto(d), own)
        torch.testing.assert_close(
            ours.batch["rollout_is_weights"],
            theirs.batch["rollout_is_weights"].double() * theirs.batch["response_mask"],
            rtol=1e-6,
            atol=1e-9,
        )
        assert torch.equal(ours.batch["response_mask"], d["mask"])
        delegated, also = driver(d, **{k: own.get(k) for k in ("rollout_is", "rollout_is_threshold")})
        assert torch.equal(delegated.batch["rollout_is_weights"], theirs.batch["rollout_is_weights"])
        assert also == metrics


def test_driver_sees_the_whole_mini_batch():
    d = data()
    ours, metrics = driver(d, rollout_is="mismatch.snis")
    mask = d["mask"].bool()
    ratio = torch.where(mask, d["old"] - d["q"], 0.0).sum(-1)[d["mask"].any(-1)].exp()
    expected = ratio / ratio.mean()
    torch.testing.assert_close(ours.batch["rollout_is_weights"][d["mask"].any(-1), 0], expected, rtol=1e-9, atol=0)
    kish = float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    assert metrics["rollout_corr/sequence_ess"] == pytest.approx(kish, rel=1e-9)
    # verl's means over responses count one without a token, with perplexity 1
    real = {key: value[d["mask"].any(-1)].nan_to_num() for key, value in d.items()}
    _, verls = verl_loss.VERL_CORRECTION(proto(real), RolloutCorrectionConfig("token"))
    for name in ("kl", "k3_kl", "chi2_token", "training_ppl"):
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(float(verls[f"rollout_corr/{name}"]), rel=1e-5)


def test_driver_refuses_what_it_cannot_do():
    for settings, words in (
        ({"rollout_is": "mismatch.dlc"}, "centres the score"),
        ({"rollout_is": "mismatch.dppo"}, "looks at the advantage"),
        ({"rollout_is": "mismatch.tsi"}, "unknown correction"),
        ({"rollout_is": "mismatch.tis", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"}, "a second time"),
    ):
        with pytest.raises(BadInput, match=words):
            driver(data(), **settings)


def test_decoupled_verl_is_the_same_update_by_either_route():
    """Driver's weight times verl's vanilla PPO, against our loss on log q, against verl written out slowly."""
    name, d = "decoupled_token_is", data()
    weighted, _ = driver(d, rollout_is=f"mismatch.verl.{name}")
    config = actor()
    vanilla, _ = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=d["old"],
        log_prob=d["log_prob"],
        advantages=d["advantage"],
        response_mask=d["mask"],
        config=config,
        rollout_is_weights=weighted.batch["rollout_is_weights"],
    )
    ours, _ = call(f"mismatch.verl.{name}", d, config)
    torch.testing.assert_close(gradient(ours, d), gradient(vanilla, d), rtol=1e-6, atol=1e-9)
    rows = [i for i in range(B) if d["mask"][i].any()]
    columns = (d["log_prob"], d["old"], d["q"])
    tokens = [list(zip(*[x[i, : int(d["mask"][i].sum())].tolist() for x in columns], strict=True)) for i in rows]
    slow = slow_verl(name, tokens, [float(d["advantage"][i, 0]) for i in rows])
    update = -gradient(ours, d) * d["mask"].sum() / d["advantage"]
    for i, expected in zip(rows, slow.update, strict=True):
        assert update[i, : len(expected)].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


# The trainer. Its rule, its config checks and its version of old are the real class's own methods; Ray's workers and
# the engines they hold stand aside.


def config_of(**changes):
    """verl's own configuration files, composed by hydra with the overrides of examples/verl.sh."""
    script = Path("realmodel/adapters/examples/verl.sh").read_text()
    overrides = re.findall(r"^    (\+?[\w.]+=\S+) ", script, re.MULTILINE)
    assert len(overrides) == script.count(" \\\n") - 1
    overrides = [text.replace("${DATA:-data}", "data").replace("${MODEL:-", "").rstrip("}") for text in overrides]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", [*overrides, *[f"{k}={v}" for k, v in changes.items()]])


class Workers:
    """Counts what the trainer asks of its workers."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


def test_the_trainer_syncs_when_the_rule_says_so_and_keeps_mu(monkeypatch):
    trainer = object.__new__(get_trainer_cls("separate_async_ess"))
    assert isinstance(trainer, PPOTrainerSeparateAsync)
    trainer.config, trainer.resync = config_of(), RESYNCS["ess_below"]
    trainer.actor_rollout_wg, trainer.standalone_checkpoint_manager = Workers(), Workers()
    trainer.prev_step_profile, trainer._enable_hybrid_replicas = False, False
    trainer.hybrid_rollout_config = type("Off", (), {"enable_switch": False})
    trainer.timing_raw, trainer.global_steps, trainer.sync_due = {}, 0, False
    monkeypatch.setattr(trainer_base.PPOTrainer, "_compute_old_log_prob", lambda *_: None)

    # what verl would report of two micro-batches on each of two ranks, at each of five updates
    rng = np.random.default_rng(0)
    spreads, truth, decided = [0.0, 0.5, 1.4, 0.0, 0.4], [], []

    def update_actor(self, batch, metrics):
        log_weights = rng.normal(0, spreads[self.global_steps - 1], (4, 16))
        sums = [lag_sums_of(row) for row in log_weights]
        metrics |= {f"actor/{k}": float(np.mean([s[k] for s in sums])) for k in sums[0]}
        truth.append(float(ess(log_weights.ravel())))
        return batch

    monkeypatch.setattr(trainer_base.PPOTrainer, "_update_actor", update_actor)
    trainer.on_init_end()
    tag = {"is_padding": False, "min_global_steps": 0, "max_global_steps": 0}
    batch = type("Meta", (), {"tags": [dict(tag) for _ in range(64)] + [tag | {"is_padding": True}]})
    for step in range(1, 6):
        trainer.global_steps = step
        metrics: dict = {}
        trainer._compute_old_log_prob(batch, metrics)
        trainer._update_actor(batch, metrics)
        assert metrics["mismatch/lag_ess"] == pytest.approx(truth[-1], rel=1e-12)
        assert not any(key.startswith("actor/mismatch/lag_") for key in metrics)
        decided.append(bool(metrics["mismatch/synced"]))
        trainer.on_step_end()
    assert truth[1] > 0.5 > truth[2]
    assert decided == [False, False, True, False, False]
    assert trainer.standalone_checkpoint_manager.calls == [("update_weights", 0), ("update_weights", 3)]
    assert metrics["mismatch/rows_of_other_versions"] == 1.0  # the rows' tags still name version 0
    moves = [call for call in trainer.actor_rollout_wg.calls if call[0] != "clear_cpu_model"]
    assert moves == [
        ("save_model_to_cpu", 0),  # step 1: weights are the sampler's
        ("save_model_to_cpu", 1),
        ("restore_model_from_cpu", 0),  # step 2: old is evaluated at those
        ("restore_model_from_cpu", 1),
        ("save_model_to_cpu", 2),
        ("restore_model_from_cpu", 0),
        ("restore_model_from_cpu", 2),
        ("save_model_to_cpu", 0),  # step 4: synced after 3
        ("save_model_to_cpu", 1),
        ("restore_model_from_cpu", 0),
        ("restore_model_from_cpu", 1),
    ]


def lag_sums_of(log_weight: np.ndarray) -> dict[str, float]:
    """What our loss reports of a micro-batch whose responses have these lag ratios; one more row has no token."""
    lag = torch.tensor(np.append(log_weight, 0.0))[:, None]
    mask = torch.ones_like(lag, dtype=torch.bool)
    mask[-1] = False
    sync = torch.full_like(lag, -50.0)
    return verl_loss.lag_sums(Batch(sync + lag, sync, mask, torch.zeros_like(lag), sync))


def test_lag_ess_of_nothing_or_too_much_is_undefined_and_syncs():
    for log_weight in (np.array([]), np.array([0.0, 400.0]), np.array([-np.inf, -np.inf])):
        metrics = {f"actor/{k}": v for k, v in lag_sums_of(log_weight).items()}
        value, error = verl_sync.lag_ess(metrics, max(len(log_weight), 1))
        assert np.isnan(value)
        assert RESYNCS["ess_below"](1, value, error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trainer.v1.separate_async.parameter_sync_step", 4),
        ("actor_rollout_ref.hybrid_engine", True),
        ("actor_rollout_ref.actor.ppo_epochs", 2),
        ("algorithm.rollout_correction.rollout_is", "token"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"),
    ],
)
def test_the_trainer_refuses_settings_that_break_its_accounts(field: str, value):
    with pytest.raises(BadInput, match=field.rpartition(".")[2]):
        get_trainer_cls("separate_async_ess")(config_of(**{field: value}))


def test_the_example_configuration_is_one_verl_accepts():
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = config_of()
    validate_config(config, need_reference_policy(config), need_critic(config))
    made = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert made.policy_loss.loss_mode in core_algos.POLICY_LOSS_REGISTRY
    assert config.trainer.v1.trainer_mode in trainer_base.TRAINER_REGISTRY
    assert config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size


def test_one_environment_variable_puts_it_into_every_process():
    code = (
        "import verl; from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base;"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn as get;"
        "print(get_trainer_cls('separate_async_ess').__name__, get('mismatch.tis').__module__,"
        "trainer_base.compute_rollout_correction_and_add_to_batch.__module__)"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "realmodel.adapters.verl_sync", "PYTHONPATH": "."}
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["EssSyncTrainer", "realmodel.adapters.verl_loss", "realmodel.adapters.verl_loss"], run
    assert rollout_corr_helper.compute_rollout_correction_and_add_to_batch is verl_loss.rollout_correction
