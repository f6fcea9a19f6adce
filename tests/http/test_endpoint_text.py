"""Tokens become text as they come: nothing is lost, nothing is written too early."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_tokenizer import train, write
from support.endpoint_calls import Instant, answer_to, call, chat_ids, embedded

from cbsim.errors import EndpointError
from cbsim.http.answers import Stops
from cbsim.http.app import App
from cbsim.http.requests import Encoder
from cbsim.http.tokenizer import EMBEDDED, PLAIN_TEMPLATE, ConversationError, open_tokenizer, plain

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé <s>\n {{ x }}"}]


@given(st.lists(st.integers(0, 4095), max_size=60))
def test_fed_text_is_the_decoded_text(ids: list[int]) -> None:
    """Whatever the tokens are; but bytes at the end that are no character yet are not written."""
    decoder = embedded().decoder()
    fed = "".join(decoder(token) for token in ids)
    whole = embedded().decode(ids)
    assert whole.startswith(fed)
    assert whole == fed or whole.endswith("\ufffd")


@given(st.text(max_size=80))
def test_a_text_comes_back(string: str) -> None:
    if "<s>" in string or "</s>" in string:
        return  # special tokens have no text
    ids = embedded().encode(string)
    decoder = embedded().decoder()
    assert embedded().decode(ids) == string == "".join(decoder(token) for token in ids)
    assert all(0 <= token < embedded().vocab for token in ids)


def test_a_text_is_encoded_without_the_interpreters_lock() -> None:
    """A server goes on while a long text is encoded in a thread: with the lock held its loop would not turn once."""
    text, turns = "the quick brown fox " * 20_000, 0
    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(embedded().encode, text)
        while not work.done():
            turns += 1
            time.sleep(0)
    assert embedded().decode(work.result()) == text
    assert turns > 100


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")])
async def test_a_text_beyond_any_context_is_refused_unread(path: str, field: str) -> None:
    """No token has more characters than the longest of the vocabulary, so such a text is not even encoded. /tokenize,
    which asks for no answer, encodes it."""
    backend = Instant(max_model_len=40)
    text = "a" * (40 * embedded().longest + 1)
    body = {"prompt": text} if field == "prompt" else {"messages": [{"role": "user", "content": text}]}
    refused = await call(App(backend), path, body)
    assert refused.status == 400 and refused.error["param"] == field
    assert "more than the 2,560 that this model's context of 40 tokens can hold" in refused.error["message"]
    assert (await call(App(backend), "/tokenize", body)).json["count"] > 40


async def test_long_texts_are_encoded_one_after_the_other() -> None:
    """Encoded texts take far more memory than texts: of many clients at once, one is encoded at a time."""
    tokenizer = Counted()
    encoder = Encoder(tokenizer, 10)  # type: ignore[arg-type] # as far as it is used
    assert await asyncio.gather(*(encoder.plain("x" * 11) for _ in range(8))) == [[0]] * 8
    assert tokenizer.most == 1


class Counted:
    """A tokenizer that counts the texts that it is encoding."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def encode(self, _: str) -> list[int]:
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0)
        self.now -= 1
        return [0]


def naive(string: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The prefix that ends first with a stop string; of two, the longer one."""
    for end in range(1, len(string) + 1):
        hits = [stop for stop in stops if string[:end].endswith(stop)]
        if hits:
            return string[: end if include else end - len(max(hits, key=len))], True
    return string, False


LETTERS = st.text("ab", min_size=1, max_size=4)


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(LETTERS, min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 4),
)
def test_stop_strings_are_found_over_any_split(
    deltas: list[str], stops: list[str], include: bool, min_tokens: int
) -> None:
    """The first tokens stop nothing. Text that has been written is never taken back."""
    finder, emitted, hit = Stops(stops, include, min_tokens), "", False
    for count, delta in enumerate(deltas, 1):
        visible, hit = finder.feed(delta, count)
        emitted += visible
        if hit:
            break
    emitted += finder.rest()
    first = "".join(deltas[:min_tokens])
    rest, expected = naive("".join(deltas[min_tokens:]), stops, include)
    assert (emitted, hit) == (first + rest, expected)


def test_only_what_may_become_a_stop_string_is_withheld() -> None:
    finder = Stops(["stop"], include=False)
    visible = [finder.feed(delta, count)[0] for count, delta in enumerate(["a s", "to", "x", "st"], 1)]
    assert visible == ["a ", "", "stox", ""]
    assert finder.rest() == "st" and finder.rest() == ""


def test_our_template_is_the_one_that_others_read() -> None:
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    assert config["chat_template"] == PLAIN_TEMPLATE
    rendered = jinja2.Template(PLAIN_TEMPLATE, keep_trailing_newline=True).render(
        messages=MESSAGES, add_generation_prompt=True
    )
    assert rendered == plain(MESSAGES)
    assert chat_ids(MESSAGES) == embedded().encode(plain(MESSAGES))


@pytest.mark.slow
def test_transformers_reads_our_folder() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(EMBEDDED))
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ids == chat_ids(MESSAGES)
    assert theirs.encode("Hé there") == embedded().encode("Hé there")
    assert frozenset({theirs.eos_token_id}) == embedded().ends


def test_a_folder_of_a_users_own(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    write(tmp_path, train(["user assistant hello"], 280))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "</s>", "lstrip": False}
    config["chat_template"] = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    tokenizer = open_tokenizer(tmp_path)
    assert tokenizer.ends == {1, 7}
    assert chat_ids([{"role": "user", "content": "hello"}], tokenizer) == tokenizer.encode("<s>[user]hello[assistant]")
    with pytest.raises(ConversationError, match="no tools"):
        chat_ids([{"role": "tool", "content": "hello"}], tokenizer)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")  # a file of its own counts more
    assert chat_ids([{"role": "user", "content": "hello"}], open_tokenizer(tmp_path)) == tokenizer.encode("hello")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "\x00"),
        ("chat_template.jinja", "{% for %}"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    if name.endswith(".jinja"):
        pytest.importorskip("jinja2")
    write(tmp_path, train(["a"], 258))
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(EndpointError, match=name.replace(".", r"\.")) as raised:
        open_tokenizer(tmp_path)
    assert raised.value.file == str(tmp_path / name)


def test_tokens_are_strings_on_request() -> None:
    """As the vocabulary writes them, as vLLM does: a space is a letter of its own, so are bytes."""
    assert answer_to("/tokenize", {"prompt": "a b"}).json["token_strs"] is None
    answer = answer_to("/tokenize", {"prompt": "Hello, world", "return_token_strs": True}).json
    assert len(answer["token_strs"]) == answer["count"] and answer["token_strs"][-2:] == [",", "Ġworld"]
    conversation = {"messages": [{"role": "user", "content": "👣"}], "return_token_strs": True}
    strings = answer_to("/tokenize", conversation).json["token_strs"]
    assert strings[0] == "<s>" and strings[5:9] == ["ð", "Ł", "ĳ", "£"]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    last = embedded().vocab - 1
    assert answer_to("/detokenize", {"tokens": [last]}).status == 200
    assert answer_to("/detokenize", {"tokens": []}).json == {"prompt": ""}
    error = answer_to("/detokenize", {"tokens": [5, last + 1]}).error
    assert error["param"] == "tokens" and error["message"] == f"`tokens`: token ids have to be from 0 to {last}"
