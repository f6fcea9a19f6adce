"""Text from a folder: the tokens are those of transformers' `generate`, characters are written whole, texts end where
the folder says, and what is wrong with a folder or a prompt is said in one sentence.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("transformers", reason="texts need transformers' tokenizers")

import folders
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cbengine import text
from cbengine.build import Setup
from cbengine.errors import UsageError
from cbengine.sampling import Sampling

PROMPTS = ("the quick", "a naïve café costs 1 000 €", "😀", "x" * 60)
TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write(tmp_path_factory.mktemp("folders") / "tiny")


@pytest.fixture
def mine(folder: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(folder, tmp_path / "mine"))


def generated(folder: Path, prompt: str, tokens: int = TOKENS) -> list[int]:
    """What transformers says, in float32, greedily."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return list(said[0, ids.shape[1] :].tolist())


def said(folder: Path, prompt: str, tokens: int = TOKENS, **how: Any) -> tuple[list[int], str]:
    """The engine's tokens, and what it wrote."""
    out = io.StringIO()
    setup = Setup(device="inline", weights=folder, end_tokens=True, **how)
    return text.generate(prompt, tokens, setup, out), out.getvalue()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_text_is_that_of_transformers(folder: Path, prompt: str) -> None:
    """Same tokens; written are the prompt as it was given, then their text, then a newline."""
    tokens, written = said(folder, prompt)
    assert tokens == generated(folder, prompt)
    assert len(tokens) == TOKENS or tokens[-1] == folders.END
    reader = AutoTokenizer.from_pretrained(folder)
    assert written == prompt + reader.decode(tokens, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize("where", ["config.json", "generation_config.json", "both", "neither"])
def test_end_tokens_of_either_file_end_a_text(mine: Path, where: str) -> None:
    """The end token is the text's last one, as in transformers; it may be in a list, and in either file. transformers
    itself looks into generation_config.json if there is one.
    """
    whole = generated(mine, PROMPTS[0])
    first, second = whole[6], whole[9]
    assert whole.index(first) == 6
    assert whole.index(second) == 9
    ends: dict[str, list[Any]] = {
        "config.json": [first, None],
        "generation_config.json": [folders.END, [5000, first]],
        "both": [second, [first]],
        "neither": [[folders.END], None],
    }
    for file, ids in zip(("config.json", "generation_config.json"), ends[where], strict=True):
        folders.alter(mine / file, eos_token_id=ids)
    assert said(mine, PROMPTS[0])[0] == (whole if where == "neither" else whole[:7])
    if where == "config.json":
        (mine / "generation_config.json").unlink()
        assert said(mine, PROMPTS[0])[0] == whole[:7]
    assert generated(mine, PROMPTS[0]) == said(mine, PROMPTS[0])[0]


def test_an_end_token_is_not_written(mine: Path) -> None:
    """... if the tokenizer calls it special."""
    whole = generated(mine, PROMPTS[0])
    folders.alter(mine / "generation_config.json", eos_token_id=whole[3])
    config = json.loads((mine / "tokenizer.json").read_text())
    (word,) = (word for word, number in config["model"]["vocab"].items() if number == whole[3])
    config["added_tokens"].append(dict(config["added_tokens"][0], id=whole[3], content=word))
    (mine / "tokenizer.json").write_text(json.dumps(config))
    tokens, written = said(mine, PROMPTS[0])
    assert tokens == whole[:4]
    assert written == PROMPTS[0] + AutoTokenizer.from_pretrained(mine).decode(tokens[:3]) + "\n"


def test_a_seed_is_a_text(folder: Path) -> None:
    """Sampled, the same seed says the same, another one something else."""
    one, same, other = (said(folder, "fox", sampling=Sampling(1.0, 20, 0.9, seed))[0] for seed in (1, 1, 2))
    assert one == same != other
    assert said(folder, "fox", sampling=Sampling(1.0, top_k=1))[0] == said(folder, "fox")[0]


# -- characters -------------------------------------------------------------------------------------------------------


class Pieces(io.StringIO):
    """What was written, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, piece: str) -> int:
        self.pieces.append(piece)
        return len(piece)


@pytest.fixture(scope="module")
def reader(folder: Path) -> Any:
    return text.tokenizer(folder)


@example("😀 é €", "ß")
@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=8), st.text(max_size=3))
def test_characters_are_written_whole(reader: Any, told: str, prompt: str) -> None:
    """A tokenizer of bytes makes up to four tokens of a character. Every piece that is written is a piece of the text,
    nothing is written before its character is whole, and nothing is left out.
    """
    out = Pieces()
    words = text.Words(reader, reader(prompt)["input_ids"], out)
    ids = reader(told)["input_ids"]
    for count, token in enumerate(ids, start=1):
        words.add(None, token)  # type: ignore[arg-type]  # it looks at the token alone
        assert told.startswith("".join(out.pieces)), (told, count, out.pieces)
    assert "".join(out.pieces) == told, "the last character comes with its last token"
    words.finish()
    assert "".join(out.pieces) == told + "\n"
    assert words.said == ids


def test_half_a_character_at_the_end_is_shown_as_such(reader: Any) -> None:
    out = Pieces()
    words = text.Words(reader, [], out)
    for token in reader("a€")["input_ids"][:-1]:
        words.add(None, token)  # type: ignore[arg-type]
    assert "".join(out.pieces) == "a"
    words.finish()
    assert "".join(out.pieces) == "a\ufffd\n"


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "tokens", "words"),
    [
        ("", 5, "--prompt: has no token"),
        ("a\udcff", 5, "--prompt: holds bytes that are no text"),
        ("a", 128, "--tokens: got 128, must be <= 127 after a prompt of 1"),
        ("€" * 60, 1, "--prompt: has 180 tokens, must be < 128"),
    ],
)
def test_a_prompt_that_cannot_be(folder: Path, prompt: str, tokens: int, words: str) -> None:
    with pytest.raises(UsageError) as error:
        said(folder, prompt, tokens)
    assert str(error.value).startswith(words)


def test_the_longest_text_that_fits(mine: Path) -> None:
    """Prompt and output together may be as long as the model's positions."""
    for file in ("config.json", "generation_config.json"):
        folders.alter(mine / file, eos_token_id=None)
    assert len(said(mine, "a", 127)[0]) == 127


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", "no tokenizer could be read"),
        ("tokenizer.json", "[]", "no tokenizer could be read"),
        ("tokenizer_config.json", "[]", "no tokenizer could be read"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["a.B", null]}, "tokenizer_class": "B"}', "token"),
        ("generation_config.json", "{", "generation_config.json: is not JSON: "),
        ("generation_config.json", "[" * 100_000, "generation_config.json: is not JSON: "),
        ("generation_config.json", "[3]", "generation_config.json: got [3], expected an object"),
        ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id: got -1, expected a token id or a list"),
        ("generation_config.json", '{"eos_token_id": [1, "2"]}', "eos_token_id: got [1, '2'], expected a token id"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id: got true, expected a token id"),
    ],
)
def test_a_broken_file_is_named(mine: Path, file: str, content: str, words: str) -> None:
    (mine / file).write_text(content)
    with pytest.raises(UsageError) as error:
        said(mine, "a", 3)
    assert str(mine) in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_a_tokenizer(mine: Path) -> None:
    (mine / "tokenizer.json").unlink()
    (mine / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match="no tokenizer could be read"):
        said(mine, "a", 3)


def test_a_tokenizer_of_another_model(mine: Path) -> None:
    """It knows more tokens than the model: an embedding that is not there must never be asked for."""
    vocab = json.loads((mine / "config.json").read_text())["vocab_size"]
    config = json.loads((mine / "tokenizer.json").read_text())
    config["added_tokens"].append(dict(config["added_tokens"][0], id=vocab, content="<more>", special=False))
    (mine / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=f"the tokenizer gives token {vocab}, the model has {vocab}: they do not"):
        said(mine, "a<more>b", 3)
    assert said(mine, "ab", 3)[1].startswith("ab")
