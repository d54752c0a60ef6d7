"""Small fast tokenizers of the kinds that real models have, trained on a few sentences."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "The harbour was quiet. A ferry waited by the old bridge! Who would cross it today? Nobody had asked the pilot.",
    "Windmills turn slowly. The baker opens at six. Bread is sold by nine. After that the street is empty again. "
    "Only the clock goes on.",
    "Rain fell on the orchard. Apples lay in the grass. The gardener counted them twice, and wrote the sum down.",
]
ALPHABET = [chr(c) for c in range(33, 127)]
KINDS = ("bytes", "trimmed", "digits", "metaspace")


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """`bytes`: GPT-2 style; `trimmed`: the same, with offsets that leave spaces out; `digits`: each digit a token, a
    BOS and an EOS token added; `metaspace`: as Llama 2, BOS added, a space put in front."""
    made = Tokenizer(models.BPE())
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "metaspace":
        alphabet = ["▁", *ALPHABET]
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    else:
        level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        split: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if kind == "digits" else []
        made.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
        made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(
        [*TEXTS, "One of the special magic numbers, 4711 in 1987. What is it: 71 or 87?"] * 2, trainer
    )
    template = {"digits": "<s> $A </s>", "metaspace": "<s> $A"}.get(kind)
    if template:
        numbers = [(name, made.token_to_id(name)) for name in special]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=numbers)
    elif kind == "trimmed":
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(tokenizer_object=made)
