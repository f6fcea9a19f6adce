"""Writes the tokenizer that needs no download: `PYTHONPATH=. python tests/http/make_tokenizer.py`.

Byte-level BPE of 4,096 tokens, trained on the documents of this repository. The same documents give the same file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cbsim.http.tokenizer import EMBEDDED, END, PLAIN_TEMPLATE, START

ROOT = Path(__file__).resolve().parents[2]
WORDS = 4096


def train(texts: Iterable[str], size: int = WORDS) -> Tokenizer:
    """A vocabulary of so many tokens, START and END among them, which has every byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[START, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(folder: Path, tokenizer: Tokenizer) -> None:
    """As transformers writes one, so that its AutoTokenizer and what loads by it read the folder, too."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": 1048576,
        "chat_template": PLAIN_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    write(EMBEDDED, train(path.read_text(encoding="utf-8") for path in documents))
