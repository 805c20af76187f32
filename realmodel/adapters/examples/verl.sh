#!/usr/bin/env bash
# verl 0.9.1 on one machine of 8 GPUs (4 train, 4 sample): token TIS on pi/q, sampler synced when the lag's ESS is below
# 1/2. pip install 'verl[vllm]==0.9.1' mismatch-sandbox, then: DATA=~/data/gsm8k MODEL=Qwen/Qwen3-1.7B bash verl.sh
# Every process of verl has to import the adapter; Ray's workers inherit the variable from the one that starts Ray.
set -euo pipefail
export VERL_USE_EXTERNAL_MODULES=realmodel.adapters.verl_sync
python3 -m verl.trainer.main_ppo \
    trainer.v1.trainer_mode=separate_async_ess \
    +trainer.v1.separate_async_ess.resync=ess_below \
    trainer.v1.separate_async.parameter_sync_step=1 \
    actor_rollout_ref.hybrid_engine=False \
    algorithm.rollout_correction.rollout_is=mismatch \
    actor_rollout_ref.actor.policy_loss.loss_mode=mismatch.tis \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    algorithm.adv_estimator=grpo \
    data.train_files=${DATA:-data}/train.parquet \
    data.val_files=${DATA:-data}/test.parquet \
    data.train_batch_size=128 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path=${MODEL:-Qwen/Qwen3-0.6B} \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.nnodes=1 \
    actor_rollout_ref.rollout.n_gpus_per_node=4 \
    actor_rollout_ref.rollout.checkpoint_engine.backend=nccl \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=1 \
    trainer.total_epochs=1 \
    trainer.logger=console \
    "$@"
