"""What vLLM answers, as a Rollout. An answer is refused unless it is complete: each token with its log-probability."""

from typing import Any

import numpy as np

from realmodel.policy.align import WHOLE, Rollout
from sandbox.errors import BadInput


def rollout(
    requests: list,
    prompt_ids: list[list[int]],
    n: int,
    vocabulary: int,
    eos: set[int],
    top: int = 0,
    version: int = 0,
) -> Rollout:
    """The engine's answer as a Rollout.

    Args:
        requests: what vLLM returned, one a prompt.
        n: responses asked for a prompt.
        vocabulary: token ids the engine can draw.
        eos: ids that end a response.
        top: how many log-probabilities were asked for besides the drawn token's; WHOLE: of every token.
        version: of the weights that drew them.

    Raises BadInput: for another number of responses, an empty one, or a log-probability that is missing.
    """
    if len(requests) != len(prompt_ids):
        raise BadInput(f"engine returned {len(requests)} requests, expected {len(prompt_ids)}")
    responses, logp, logp_all, top_ids = [], [], [], []
    for i, request in enumerate(requests):
        if len(request.outputs) != n:
            raise BadInput(f"engine returned {len(request.outputs)} responses to prompt {i}, expected {n}")
        for output in request.outputs:
            ids = list(output.token_ids)
            drawn, everything, likeliest = _logp(ids, output.logprobs, vocabulary, top, f"response {len(responses)}")
            responses.append(ids)
            logp.append(drawn)
            logp_all.append(everything)
            top_ids.append(likeliest)
    return Rollout(
        prompt_ids=[list(p) for p in prompt_ids for _ in range(n)],
        response_ids=responses,
        logp=logp,
        logp_all=logp_all if top else None,
        top_ids=top_ids if top > 0 else None,
        version=version,
        prompt_index=np.repeat(np.arange(len(prompt_ids)), n),
        finished=np.array([ids[-1] in eos for ids in responses]),
    )


def _logp(
    ids: list[int], flat: Any, vocabulary: int, top: int, name: str
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Log-probabilities of the drawn tokens (T,); of all (T, V) or of the k likeliest (T, k); and which those k are.

    The engine lists, for each step, the drawn token first and then the others by rank, the drawn one among them.
    """
    if not ids:
        raise BadInput(f"engine returned an empty {name}")
    if flat is None or len(flat) != len(ids) or any(value is None for value in flat.logprobs):
        raise BadInput(f"engine reported no log-probability for a token of {name}")
    values = np.array(flat.logprobs, dtype=np.float32)
    tokens = np.array(flat.token_ids)
    drawn = np.array(flat.start_indices)
    if tokens[drawn].tolist() != ids:
        raise BadInput(f"engine reported log-probabilities of other tokens than it drew in {name}")
    if not top:
        return values[drawn], None, None
    if len(values) != len(ids) * ((vocabulary if top == WHOLE else top) + 1):
        asked = "the whole vocabulary" if top == WHOLE else f"the top {top}"
        raise BadInput(f"engine reported {len(values)} log-probabilities in {name}, not {asked}")
    ranked, values_ranked = tokens.reshape(len(ids), -1), values.reshape(len(ids), -1)
    if top != WHOLE:
        return values[drawn], values_ranked[:, 1:], ranked[:, 1:]
    everything = np.full((len(ids), vocabulary), np.nan, dtype=np.float32)
    np.put_along_axis(everything, ranked, values_ranked, axis=1)
    if np.isnan(everything).any():
        raise BadInput(f"engine reported no log-probability for part of the vocabulary in {name}")
    return values[drawn], everything, None
