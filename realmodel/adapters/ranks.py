"""The effective sample size of the global batch, where every rank of a distributed trainer holds some responses."""

import torch
import torch.distributed as dist
from torch import Tensor

from sandbox.metrics import ess_sums, gathered_ess


def global_ess(log_weight: Tensor, group: dist.ProcessGroup | None = None) -> tuple[float, float]:
    """(ESS, standard error) of the responses of all ranks, by one all-gather of five numbers a rank.

    Every rank of the group must call it, also one without responses, and gets the same two numbers. float64, so that
    it equals the ESS of one process that held everything. Without torch.distributed it is this process's own.

    Args:
        log_weight: raw sequence log weights of this rank's responses, nats. (n,)
        group: the ranks that share the batch; all of them by default.
    """
    sums = ess_sums(log_weight.detach().double())
    if not (dist.is_available() and dist.is_initialized()):
        return gathered_ess(sums[None])
    gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, sums, group)
    return gathered_ess(torch.stack(gathered))
