"""Slow second opinion: scalar loops over every sequence of a small problem, and over every token of a drawn batch.

Nothing here calls the code it checks, but for the data class `Problem`. Formulas are written as in THEORY.md, in
probabilities rather than logarithms. Tables are log-probabilities (S, V); an episode is a list of (state, token).
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from sandbox.tabular.problems import Problem

Episode = list[tuple[int, int]]
FACTORED = ("none", "tis", "mis", "icepop", "cis", "dlc")


def episodes(problem: Problem) -> Iterator[Episode]:
    """Every sequence of the problem."""

    def extend(prefix: Episode, state: int) -> Iterator[Episode]:
        if state == -1 or len(prefix) == problem.horizon:
            yield prefix
            return
        for token in range(problem.shape[1]):
            yield from extend([*prefix, (state, token)], int(problem.transition[state, token]))

    return extend([], problem.initial)


def log_prob(table: np.ndarray, episode: Episode) -> float:
    return math.fsum(float(table[s, a]) for s, a in episode)


def reward(problem: Problem, episode: Episode) -> float:
    return math.fsum(float(problem.reward[s, a]) for s, a in episode)


def mean(problem: Problem, table: np.ndarray, f: Callable[[Episode], float]) -> float:
    """E[f(episode)] under the policy of `table`."""
    return math.fsum(math.exp(log_prob(table, e)) * f(e) for e in episodes(problem))


def returns(problem: Problem, table: np.ndarray) -> float:
    return mean(problem, table, lambda e: reward(problem, e))


def return_sd(problem: Problem, table: np.ndarray) -> float:
    centre = returns(problem, table)
    return math.sqrt(mean(problem, table, lambda e: (reward(problem, e) - centre) ** 2))


def ess(problem: Problem, p: np.ndarray, q: np.ndarray) -> float:
    """1 / E_q[(p/q)^2]"""
    return 1 / mean(problem, q, lambda e: math.exp(log_prob(p, e) - log_prob(q, e)) ** 2)


def lag_ess_under_sampler(problem: Problem, pi: np.ndarray, mu: np.ndarray, q: np.ndarray) -> float:
    def ratio(e: Episode) -> float:
        return math.exp(log_prob(pi, e) - log_prob(mu, e))

    return mean(problem, q, ratio) ** 2 / mean(problem, q, lambda e: ratio(e) ** 2)


def kl(problem: Problem, p: np.ndarray, q: np.ndarray) -> float:
    return mean(problem, p, lambda e: log_prob(p, e) - log_prob(q, e))


def token_kl(problem: Problem, p: np.ndarray, q: np.ndarray) -> float:
    """Mean over the expected tokens of q of KL(q(.|s) || p(.|s)), from the KL of each visited state."""
    at_state = [sum(math.exp(x) * (x - y) for x, y in zip(*rows, strict=True)) for rows in zip(q, p, strict=True)]
    return mean(problem, q, lambda e: sum(at_state[s] for s, _ in e)) / mean(problem, q, len)


def variance_log_ratio(problem: Problem, p: np.ndarray, q: np.ndarray) -> float:
    centre = -kl(problem, q, p)
    return mean(problem, q, lambda e: (log_prob(p, e) - log_prob(q, e) - centre) ** 2)


def visits(problem: Problem, table: np.ndarray) -> list[float]:
    return [mean(problem, table, lambda e, s=s: sum(x == s for x, _ in e)) for s in range(problem.shape[0])]


def token_weight(name: str, pi: float, mu: float, q: float, advantage: float) -> float:
    """Weight of one token from its three probabilities; reference for the token-level presets of `rules.py`."""
    rho = pi / q
    if name == "none":
        return 1.0
    if name == "tis":
        return min(rho, 2.0)
    if name == "mis":
        return rho if rho <= 2.0 else 0.0
    if name == "icepop":
        return rho if 0.5 <= rho <= 5.0 else 0.0
    if name == "ppo":
        clipped = (advantage > 0 and rho > 1.2) or (advantage < 0 and rho < 0.8)
        return 0.0 if clipped else rho
    if name == "ppo_dual":
        return 0.0 if advantage < 0 and rho > 3.0 else token_weight("ppo", pi, mu, q, advantage)
    if name == "cispo":
        return min(max(rho, 0.8), 1.2)
    if name == "dppo":
        too_far = pi - q > 0.2 if advantage > 0 else pi - q < -0.2
        return 0.0 if too_far else rho
    if name == "dppo_kl":
        kl = q * math.log(q / pi) + (1 - q) * math.log((1 - q) / (1 - pi))
        return 0.0 if kl > 0.05 and (pi > q if advantage > 0 else pi < q) else rho
    if name in ("cis", "cis_raised"):  # in log-odds, as THEORY section 7 defines it
        odds_q, odds_pi = q / (1 - q), pi / (1 - pi)
        odds = odds_q * min(odds_pi / odds_q, 2.0)
        odds = max(odds, odds_q / 2.0) if name == "cis_raised" else odds
        return odds / (1 + odds) / q
    if name == "dlc":
        return min(pi / mu, 2.0)
    raise KeyError(name)


def weights(name: str, pi: np.ndarray, mu: np.ndarray, q: np.ndarray, e: Episode, advantage: float) -> list[float]:
    """Weight of every token of one response."""
    rho = math.exp(log_prob(pi, e) - log_prob(q, e))
    lag = math.exp(log_prob(pi, e) - log_prob(mu, e))
    sequence = {
        "seq_is": rho,
        "seq_tis": min(rho, 2.0),
        "seq_mis": rho if rho <= 2.0 else 0.0,
        "seq_dlc": min(lag, 2.0),
    }
    geometric = rho ** (1 / len(e))
    sequence["geo_tis"] = min(geometric, 2.0)
    sequence["geo_mis"] = geometric if 0.99 <= geometric <= 1.01 else 0.0
    clipped = (advantage > 0 and geometric > 1.0004) or (advantage < 0 and geometric < 0.9997)
    sequence["gspo"] = 0.0 if clipped else geometric
    sequence["opsm"] = 0.0 if advantage < 0 and -math.log(geometric) > 0.1 else 1.0
    if name in sequence:
        return [sequence[name]] * len(e)
    if name == "prefix_tis":
        so_far = [math.exp(log_prob(pi, e[: t + 1]) - log_prob(q, e[: t + 1])) for t in range(len(e))]
        return [min(x, 2.0) for x in so_far]
    return [token_weight(name, math.exp(pi[x]), math.exp(mu[x]), math.exp(q[x]), advantage) for x in e]


def centre(name: str, pi: np.ndarray, mu: np.ndarray, q: np.ndarray) -> np.ndarray:
    """c(.|s): q min(pi/mu, 2) or q pi/mu, normalised, for the centred corrections; pi for the others."""
    if name not in ("dlc", "seq_dlc"):
        return np.exp(pi)
    cap = 2.0 if name == "dlc" else math.inf
    mass = np.exp(q) * np.minimum(np.exp(pi) / np.exp(mu), cap)
    return mass / mass.sum(axis=1, keepdims=True)


def response_update(
    name: str, pi: np.ndarray, mu: np.ndarray, q: np.ndarray, e: Episode, advantage: float
) -> np.ndarray:
    """sum_t weight_t A (e_a - c(.|s)) of one response. (S, V)"""
    total, c = np.zeros_like(pi), centre(name, pi, mu, q)
    for (s, a), weight in zip(e, weights(name, pi, mu, q, e, advantage), strict=True):
        total[s] -= weight * advantage * c[s]
        total[s, a] += weight * advantage
    return total


def expected_update(
    problem: Problem, pi: np.ndarray, mu: np.ndarray, q: np.ndarray, name: str, normalised: bool = False
) -> np.ndarray:
    """E_q of `response_update` with A = R - E_q[R], over sd_q(R) + 1e-6 where normalised. (S, V)"""
    baseline = returns(problem, q)
    scale = return_sd(problem, q) + 1e-6 if normalised else 1.0
    total = np.zeros_like(pi)
    for e in episodes(problem):
        advantage = (reward(problem, e) - baseline) / scale
        total += math.exp(log_prob(q, e)) * response_update(name, pi, mu, q, e, advantage)
    return total


def batch_update(
    problem: Problem, pi: np.ndarray, mu: np.ndarray, q: np.ndarray, batch: list[Episode], name: str, normalised: bool
) -> np.ndarray:
    """Mean over the drawn responses, advantage against the batch's own mean and standard deviation. (S, V)"""
    rewards = [reward(problem, e) for e in batch]
    baseline = sum(rewards) / len(batch)
    sd = math.sqrt(sum((r - baseline) ** 2 for r in rewards) / len(batch))
    scale = sd + 1e-6 if normalised else 1.0
    total = np.zeros_like(pi)
    for e, r in zip(batch, rewards, strict=True):
        total += response_update(name, pi, mu, q, e, (r - baseline) / scale)
    return total / len(batch)


def gradient(problem: Problem, logits: np.ndarray, h: float = 1e-5) -> np.ndarray:
    """Central differences of the return with respect to the logits. (S, V)"""
    result = np.zeros_like(logits)
    for index in np.ndindex(logits.shape):
        for sign in (1, -1):
            moved = logits.copy()
            moved[index] += sign * h
            moved = moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))
            result[index] += sign * returns(problem, moved) / (2 * h)
    return result


def trace_fisher_covariance(problem: Problem, p: np.ndarray, normalised: bool) -> float:
    """tr(F Sigma) with F = E[score score'] and Sigma = Cov[A score] as full matrices over all logits."""
    baseline = returns(problem, p)
    scale = return_sd(problem, p) + 1e-6 if normalised else 1.0
    fisher, second, first = np.zeros((p.size, p.size)), np.zeros((p.size, p.size)), np.zeros(p.size)
    for e in episodes(problem):
        probability = math.exp(log_prob(p, e))
        score = response_update("none", p, p, p, e, 1.0).ravel()
        grad = score * (reward(problem, e) - baseline) / scale
        fisher += probability * np.outer(score, score)
        second += probability * np.outer(grad, grad)
        first += probability * grad
    return float(np.trace(fisher @ (second - np.outer(first, first))))


def bias_split(problem: Problem, mu: np.ndarray, log_ratio: np.ndarray) -> dict[str, np.ndarray]:
    """The four parts of THEORY section 4, each as its expectation over all sequences. (S, V) each"""
    p = np.exp(mu)
    d = np.array([[x - math.fsum(row_p * row) for x in row] for row_p, row in zip(p, log_ratio, strict=True)])
    baseline = returns(problem, mu)
    mass, gain = {}, {}  # of every prefix: its probability, and E[A; prefix]
    for e in episodes(problem):
        for t in range(len(e)):
            key = tuple(e[:t])
            mass[key] = mass.get(key, 0.0) + math.exp(log_prob(mu, e))
            gain[key] = gain.get(key, 0.0) + math.exp(log_prob(mu, e)) * (reward(problem, e) - baseline)
    parts = {name: np.zeros_like(mu) for name in ("leading", "within_token", "prefix", "downstream")}
    for e in episodes(problem):
        probability, advantage = math.exp(log_prob(mu, e)), reward(problem, e) - baseline
        for t, (s, a) in enumerate(e):
            score = -p[s]
            score[a] += 1
            at_prefix = gain[tuple(e[:t])] / mass[tuple(e[:t])]
            before, after = sum(d[x] for x in e[:t]), sum(d[x] for x in e[t + 1 :])
            parts["leading"][s] += probability * -d[s, a] * at_prefix * score
            parts["within_token"][s] += probability * -d[s, a] * (advantage - at_prefix) * score
            parts["prefix"][s] += probability * -before * advantage * score
            parts["downstream"][s] += probability * -after * advantage * score
    return parts


def lag_matrices(problem: Problem, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """H = E[A hess log p], M = E[A score score'], its part where both scores are of one token, F = E[score score'].

    Centred advantage; over all logits, state by state. (S V, S V) each
    """
    baseline, vocabulary = returns(problem, p), p.shape[1]
    h, m, same, fisher = (np.zeros((p.size, p.size)) for _ in range(4))
    for e in episodes(problem):
        probability = math.exp(log_prob(p, e))
        weighted = probability * (reward(problem, e) - baseline)
        total = np.zeros(p.size)
        for s, a in e:
            block = slice(s * vocabulary, (s + 1) * vocabulary)
            row = np.exp(p[s])
            h[block, block] -= weighted * (np.diag(row) - np.outer(row, row))
            score = np.zeros(p.size)
            score[block] -= row
            score[s * vocabulary + a] += 1
            same += weighted * np.outer(score, score)
            total += score
        m += weighted * np.outer(total, total)
        fisher += probability * np.outer(total, total)
    return h, m, same, fisher


# The recursions step by step, in numpy, for problems too long to enumerate.


def long_log_sum(problem: Problem, log_kernel: np.ndarray) -> float:
    value = np.zeros(problem.shape[0] + 1)
    for _ in range(problem.horizon):
        value[:-1] = np.logaddexp.reduce(log_kernel + value[problem.transition], axis=1)
    return float(value[problem.initial])


def long_values(problem: Problem, table: np.ndarray, f: np.ndarray) -> np.ndarray:
    """What is still to come of f with n = 0 .. T steps left. (T + 1, S + 1)"""
    value = np.zeros((problem.horizon + 1, problem.shape[0] + 1))
    for n in range(problem.horizon):
        value[n + 1, :-1] = (np.exp(table) * (f + value[n][problem.transition])).sum(axis=1)
    return value


def long_advantage_visits(problem: Problem, table: np.ndarray) -> np.ndarray:
    """sum_t P(s_t = s) (E[R | s_t = s, a_t = a] - E[R]). (S, V)"""
    p, states = np.exp(table), problem.shape[0]
    value = long_values(problem, table, problem.reward)
    now, past = np.zeros((2, states + 1))
    now[problem.initial] = 1.0
    total = np.zeros(problem.shape)
    for t in range(problem.horizon):
        rest = problem.reward + value[problem.horizon - 1 - t][problem.transition] - value[-1, problem.initial]
        total += past[:-1, None] + now[:-1, None] * rest
        now_after, past_after = np.zeros((2, states + 1))
        np.add.at(now_after, problem.transition, now[:-1, None] * p)
        np.add.at(past_after, problem.transition, (past[:-1, None] + now[:-1, None] * problem.reward) * p)
        now, past = now_after, past_after
    return total
