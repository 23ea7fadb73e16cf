"""New models: random weights from sizes, small byte-level tokenizers, and the tiny model for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
TINY_RECIPE = 2  # raise when build_tiny writes other files
TINY_TEXT = (
    "Return the mean of an array along the given axis. The average is taken over the flattened array by default.",
    "Compute the singular value decomposition of a matrix and return its factors as a named tuple of arrays.",
    "A layer of a transformer adds the output of attention and of a small network to the residual stream.",
    "Optimal transport moves the mass of one distribution to another at the least total cost.",
    "Parameters: x is the input array, axis is an integer or None, and out is where the result is written.",
    "Raises ValueError if the shapes do not match, with a message that names the argument and the remedy.",
    "Every new layer is made from the two layers beside it, so the deeper model starts near the base.",
    "The rain had stopped before noon, and the children went down to the river with their dog.",
    "See also: the functions for medians, quantiles and variances; examples are given at the end of the page.",
    "def solve(cost, epsilon=0.06, tolerance=1e-4): return plan  # float64, checked for its marginals",
    "Numbers such as 0, 1, 2, 3.14 and 2048 are split into digits; spaces and punctuation are kept.",
    "What was measured on one machine should be measured again on another before anyone believes it.",
)


def new_model(sizes: dict[str, Any], tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """A model with random float32 weights; sizes are the architecture's configuration entries.

    The global random state is left as it was. ValueError where the tokenizer needs a larger vocabulary.
    """
    if len(tokenizer) > sizes["vocab_size"]:
        raise ValueError(
            f"model.sizes.vocab_size={sizes['vocab_size']}: the tokenizer has {len(tokenizer)} entries; raise it."
        )
    rest = {name: value for name, value in sizes.items() if name != "model_type"}
    config = CONFIG_MAPPING[sizes.get("model_type", "llama")](
        **rest, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
    )  # without pad_token_id, which would keep that embedding row from training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most vocab_size entries, digits kept apart; its end-of-text token begins and ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        pad_token=PADDING,
    )


def end_of_text(tokenizer: Any) -> int:
    """The token between documents: <|endoftext|> where there is one (an instruct model's eos ends a turn), else eos."""
    return tokenizer.get_vocab().get(END_OF_TEXT, tokenizer.eos_token_id)


def build_tiny(sizes: dict[str, Any], folder: Path) -> None:
    """Fills the folder with a random model and a tokenizer trained on a few sentences; always the same."""
    tokenizer = train_tokenizer(TINY_TEXT, sizes["vocab_size"])
    new_model(sizes, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
