"""GRPO with TRL, a correction of ours and a sampler synced by a rule, from a YAML file:

python -m realmodel.adapters.examples.trl_grpo --config realmodel/adapters/examples/trl_small.yaml

`model: small` is the small Qwen3 of this project on one of its tasks; any other name is a folder or a hub's model.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from trl import TrlParser  # pyright: ignore[reportMissingImports]

from realmodel.adapters.trl_sampler import CopySampler
from realmodel.adapters.trl_trainer import MismatchGRPOConfig, MismatchGRPOTrainer
from realmodel.policy import model as policy
from realmodel.policy import small, tasks


@dataclass
class Run:
    """What the YAML says besides MismatchGRPOConfig."""

    model: str = field(default="small", metadata={"help": "small, a folder, or a hub's model"})
    task: str = field(default="sort8", metadata={"help": "key of realmodel.policy.tasks.TASKS"})
    problems: int = field(default=2000, metadata={"help": "prompts in the training set"})


def main() -> None:
    run, args = TrlParser((Run, MismatchGRPOConfig)).parse_args_and_config()
    task = tasks.get(run.task)
    path = small.resolve(run.model, run.task)
    model, tokenizer = policy.load(path)
    problems = task.sample(np.random.default_rng(args.seed), run.problems, held_out=False)
    data = Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems])

    def right(completion_ids: list[list[int]], answer: list[str], **_) -> list[float]:
        pairs = zip(completion_ids, answer, strict=True)
        return [tasks.reward(ids, tokenizer.encode(a), tokenizer.eos_token_id) for ids, a in pairs]

    sampler = None if args.use_vllm else CopySampler(torch.bfloat16, args.centre_top_k)
    MismatchGRPOTrainer(model, right, args, data, processing_class=tokenizer, rollout_func=sampler).train()


if __name__ == "__main__":
    main()
