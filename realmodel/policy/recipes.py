"""The small policies that `model.build` makes, by name, their tokenizer, and their weights before any training."""

import string
from dataclasses import dataclass
from typing import Any

import torch

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.digits + string.ascii_lowercase + " >+-*/=()[]{}<,.:;?!#|&%$@"  # with PAD and EOS: 64 tokens


@dataclass(frozen=True)
class Recipe:
    """How a small policy is built; any change means another folder in the cache.

    Args:
        task: key of tasks.TASKS.
        corruption: probability that an answer character is replaced by a random one in supervised training.
        steps, batch, learning_rate: of AdamW, with a short warm-up and a cosine to zero.
        seed: of initialisation and data.
        hidden, layers, heads, kv_heads, head_dim, intermediate: shape of the Qwen3.
        experts: of each layer, of which two serve a token, `intermediate` wide; 0 is a dense model.
    """

    task: str = "sort8"
    corruption: float = 0.1
    steps: int = 300
    batch: int = 256
    learning_rate: float = 4e-3
    seed: int = 0
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 192
    experts: int = 0


# By the name in a run's `model`: what it changes in the recipe. Experts are a multiple of 32 wide, as vLLM's kernel is.
NAMED: dict[str, dict[str, Any]] = {"small": {}, "small-moe": {"intermediate": 64, "experts": 8}}


def char_tokenizer() -> Any:
    """One token per character of CHARACTERS, with PAD and EOS; AutoTokenizer and vLLM load it from its folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD)


def initialise(recipe: Recipe, tokenizer: Any) -> Any:
    """An untrained Qwen3 or Qwen3-MoE of the recipe's shape, float32, tied; the caller's random state is untouched."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "intermediate_size": recipe.intermediate,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        if not recipe.experts:
            return Qwen3ForCausalLM(Qwen3Config(**shape))
        mixture = {"num_experts": recipe.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, moe_intermediate_size=recipe.intermediate, **mixture))
