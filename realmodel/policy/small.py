"""The small policies of our own: shipped with the package, cached, or built here from their recipe (recipes.py).

Supervised training on deliberately corrupted answers makes a policy that is right less than half the time at
temperature 1, although its most likely answer is nearly always right. Reinforcement learning then only has to sharpen
it. The same recipe gives other weights on another machine, so those that most runs start from are shipped, and a run
repeats elsewhere as far as its engine does. `python -m realmodel.policy.small` builds the shipped ones again.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from realmodel.policy import tasks
from realmodel.policy.align import pad_ids
from realmodel.policy.logprobs import log_probs
from realmodel.policy.model import greedy_right, no_progress_bars, pass_probability
from realmodel.policy.recipes import CHARACTERS, NAMED, Recipe, char_tokenizer, initialise
from sandbox.errors import BadInput

Progress = Callable[[int, int, float], None]  # step, steps, loss
EVALUATED = 1024  # held-out problems
PARTS = ("config.json", "model.safetensors", "tokenizer.json", "recipe.json")  # of a built folder
SHIPPED = Path(__file__).with_name("weights")  # a folder a task
SHIPPED_TASKS = ("sort8", "sort24")


def recipe_of(model: str, task: str) -> Recipe:
    """The recipe of a small model's name for a task, trained as that task needs. Raises BadInput: an unknown task."""
    learnt = tasks.get(task)
    return Recipe(**{"task": task, "steps": learnt.supervised_steps, "corruption": learnt.corruption, **NAMED[model]})


def resolve(model: str, task: str, progress: Progress | None = None) -> str | Path:
    """What to load for a run's `model`: the folder of a recipe's name (`build`), else the folder or hub name itself.

    Raises BadInput: as `build`.
    """
    return model if model not in NAMED else build(recipe_of(model, task), progress)


def shipped(recipe: Recipe) -> Path | None:
    """The package's folder of that recipe; None where it ships none.

    Raises BadInput: weights that are not those whose hash recipe.json states.
    """
    folder = SHIPPED / recipe.task
    try:
        record = json.loads((folder / "recipe.json").read_text())
        if record["recipe"] != dataclasses.asdict(recipe):
            return None
        good = record["sha256"] == _hash(folder)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise BadInput(f"shipped model {folder} is damaged, its hash is not that of recipe.json: install again")
    return folder


def _hash(folder: Path) -> str:
    """SHA-256 of the weights, and of the tokenizer and config that they are read by."""
    digest = hashlib.sha256()
    for part in sorted(set(PARTS) - {"recipe.json"}):
        digest.update((folder / part).read_bytes())
    return digest.hexdigest()


def build(recipe: Recipe, progress: Progress | None = None) -> Path:
    """Folder of the policy that the recipe describes: shipped, cached, or built now into the cache.

    The cache is $MISMATCH_CACHE or ~/.cache/mismatch-sandbox. The same recipe gives the same weights on one machine
    at one number of threads.

    Raises BadInput: an unknown task, one that the vocabulary cannot spell, a cache that cannot be written, a damaged
    folder.
    """
    tasks.get(recipe.task)
    if (ours := shipped(recipe)) is not None:
        return ours
    cache = Path(os.environ.get("MISMATCH_CACHE") or Path.home() / ".cache" / "mismatch-sandbox")
    key = hashlib.sha256(json.dumps(dataclasses.asdict(recipe), sort_keys=True).encode()).hexdigest()[:12]
    folder = cache / f"{recipe.task}-{key}"
    if folder.is_dir():
        missing = [name for name in PARTS if not (folder / name).is_file()]
        if missing:
            raise BadInput(f"cached model {folder} is damaged, {', '.join(missing)} is missing: delete the folder")
        return folder
    _check_spelling(recipe)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(cache)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.{os.getpid()}.", dir=cache))
    except OSError as error:
        raise BadInput(f"cache {cache} of the small model cannot be written: {error.strerror}") from error
    try:
        make(recipe, unfinished, progress)
        try:
            unfinished.rename(folder)
        except OSError:  # another process built the same recipe meanwhile; its weights serve as well
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def make(recipe: Recipe, folder: Path, progress: Progress | None = None) -> dict:
    """Train the recipe's policy and write it into a folder, which is there. Returns what recipe.json then says."""
    no_progress_bars()
    begin, task = time.perf_counter(), tasks.get(recipe.task)
    tokenizer = char_tokenizer()
    model = initialise(recipe, tokenizer)
    _train(model, tokenizer, task, recipe, progress)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    held_out = _held_out(recipe)
    record = {
        "recipe": dataclasses.asdict(recipe),
        "sha256": _hash(folder),
        "held_out": EVALUATED,
        "pass_probability": float(pass_probability(model, held_out, tokenizer).mean()),
        "greedy_accuracy": float(greedy_right(model, held_out, tokenizer).float().mean()),
        "seconds": time.perf_counter() - begin,
    }
    (folder / "recipe.json").write_text(json.dumps(record, indent=1))
    return record


def _held_out(recipe: Recipe) -> list[tasks.Problem]:
    return tasks.get(recipe.task).sample(np.random.default_rng([recipe.seed, 1]), EVALUATED, held_out=True)


def _check_spelling(recipe: Recipe) -> None:
    for problem in _held_out(recipe):
        if strange := sorted({*problem.prompt, *problem.answer} - {*CHARACTERS}):
            raise BadInput(
                f"task {recipe.task!r} has characters that the small model's vocabulary lacks ({''.join(strange)!r}): "
                "name a pretrained model"
            )


def _remove_abandoned(cache: Path) -> None:
    """Delete half-built folders (`name.pid.random`) of processes that were killed: those whose pid is gone."""
    for folder in cache.glob("*.*.*"):
        pid = folder.name.split(".")[1]
        if pid.isdigit():
            try:
                os.kill(int(pid), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)
            except (OSError, OverflowError):
                continue  # someone else's live process


def _train(model, tokenizer, task, recipe: Recipe, progress) -> None:
    """Supervised training on prompts outside the held-out tenth, with corrupted answers."""
    rng = np.random.default_rng([recipe.seed, 0])
    noise = np.array(tokenizer.convert_tokens_to_ids(list(task.answer_characters)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, recipe.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda s: min(1.0, (s + 1) / warm) * 0.5 * (1 + math.cos(math.pi * s / recipe.steps)),
    )
    for step in range(recipe.steps):
        problems = task.sample(rng, recipe.batch, held_out=False)
        prompts = [tokenizer.convert_tokens_to_ids(list(p.prompt)) for p in problems]
        answers = []
        for problem in problems:
            answer = np.array(tokenizer.convert_tokens_to_ids(list(problem.answer)))
            wrong = rng.random(len(answer)) < recipe.corruption
            answers.append([*np.where(wrong, rng.choice(noise, len(answer)), answer).tolist(), tokenizer.eos_token_id])
        ids, attention = pad_ids([p + a for p, a in zip(prompts, answers, strict=True)], tokenizer.pad_token_id)
        counted = torch.zeros_like(ids, dtype=torch.bool)
        for b, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            counted[b, len(prompt) : len(prompt) + len(answer)] = True
        logp = log_probs(model, ids[:, :-1], attention[:, :-1])
        loss = -logp.gather(-1, ids[:, 1:, None])[..., 0][counted[:, 1:]].mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, recipe.steps, loss.item())


def main() -> None:
    """Build the shipped weights again, in place."""
    for name in SHIPPED_TASKS:
        folder = SHIPPED / name
        folder.mkdir(parents=True, exist_ok=True)
        record = make(recipe_of("small", name), folder)
        print(f"{name}: pass rate {record['pass_probability']:.3f}, greedy {record['greedy_accuracy']:.3f}")


if __name__ == "__main__":
    main()
