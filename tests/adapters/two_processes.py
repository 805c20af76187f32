"""What `torchrun` runs for test_trl: two ranks train, and each writes what it saw of every update."""

import sys
from pathlib import Path

import torch

from realmodel.policy import model as policy
from sandbox.metrics import sequence_log_weight
from tests.adapters.test_trl import Watched, trainer


def main(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    settings = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
    made = trainer(folder, out, Watched, correction="tis", resync="ess_below", max_steps=6, **settings)
    made.train()
    record = {
        "log_weights": [sequence_log_weight(seen.batch, "lag").double() for seen in made.seen],
        "synced_at": [seen.synced_at for seen in made.seen],
        "lag_ess": [row["mismatch/lag_ess"] for row in made.state.log_history if "mismatch/lag_ess" in row],
        "weights": policy.snapshot(made.accelerator.unwrap_model(made.model)),
    }
    torch.save(record, out / f"{made.accelerator.process_index}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
