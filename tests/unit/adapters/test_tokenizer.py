"""The tokenizer: rendering as vLLM does it, and a cache that never changes an encoding."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from pointsman.adapters.tokenizer import (
    ChatTemplateError,
    TemplateRefusedError,
    Tokenizer,
    TokenizerLoadError,
    UnsupportedContentError,
)
from pointsman.adapters.tokenizer.prefix_cache import PIECE_TOKENS
from pointsman.adapters.tokenizer.tokenizer import BUILTIN_DIRECTORY
from pointsman_lab import tokenizer_training
from tests.support.examples import examples

GPT4_LIKE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIALS = ["<s>", "<|im_start|>", "<|im_end|>"]
FAMILIES = ["byte_level", "gpt4_like", "sentencepiece_like", "metaspace_first", "stripping_specials"]


@cache
def backend_json(family: str) -> str:
    """A small tokenizer built the way a family of models builds theirs."""
    backend = Backend(models.BPE(byte_fallback=family == "sentencepiece_like"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    match family:
        case "byte_level" | "stripping_specials":
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "gpt4_like":
            backend.normalizer = normalizers.NFC()
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(GPT4_LIKE), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        case "sentencepiece_like":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            alphabet = []
        case _:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
            alphabet = []
    strips = family == "stripping_specials"
    specials = [AddedToken(text, special=True, normalized=False, rstrip=strips) for text in SPECIALS]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    passages = list(tokenizer_training.training_text(random.Random(7)))[:2000]
    if family == "sentencepiece_like":
        passages = " ".join(passages).split(" ")
    backend.train_from_iterator(passages, trainer)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend.to_str()


def plain_encode(family: str, text: str, *, add_special_tokens: bool) -> list[int]:
    return Backend.from_str(backend_json(family)).encode(text, add_special_tokens=add_special_tokens).ids


words = st.sampled_from(["the", "engine", "Moves", "tokens", "naïve", "привет", "世界", "é", "don't", "a_b", "x1"])
fragments = st.one_of(
    st.lists(words, min_size=1, max_size=120).map(" ".join),
    st.integers(1, 400).map(lambda n: " " * n),
    st.integers(1, 60).map(lambda n: "\n\t" * n),
    st.integers(0, 10**60).map(str),
    st.text(max_size=60),
    st.sampled_from(
        [
            "def f(x):\n    return x",
            "<|im_end|>",
            "<|im_start|>user\n",
            "<s>",
            "<|im_",
            " <|im_end|> ",
            "🙂👩‍👩‍👧",
            "e\u0301 a",
        ]
    ),
)
texts = st.tuples(st.lists(fragments, min_size=1, max_size=8), st.integers(1, 12)).map(lambda p: "".join(p[0]) * p[1])


@pytest.mark.parametrize("family", FAMILIES)
@examples(40)
@given(opening=texts, turns=st.lists(texts, min_size=1, max_size=3), framed=st.booleans())
def test_a_conversation_encodes_turn_by_turn_to_the_ids_of_the_whole(
    family: str, opening: str, turns: list[str], framed: bool
) -> None:
    tokenizer = Tokenizer(Backend.from_str(backend_json(family)))
    text = opening
    for turn in turns:
        text += turn

        assert tokenizer.encode(text, add_special_tokens=framed) == plain_encode(
            family, text, add_special_tokens=framed
        )


def test_the_next_turn_encodes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.builtin()
    encoded_chars = _count_encoded_chars(tokenizer, monkeypatch)
    history = "".join(tokenizer_training.training_text(random.Random(3)))[:40_000]
    tokenizer.encode(history)
    encoded_chars.clear()

    tokenizer.encode(history + " and one more question about it")

    assert 0 < sum(encoded_chars) < 4_000


def test_a_cut_that_would_change_ids_is_noticed_and_the_text_encoded_whole() -> None:
    backend = Backend(models.BPE(vocab={"a": 0, " ": 1, "b": 2, "a b": 3, "a ": 4}, merges=[("a", " "), ("a ", "b")]))
    tokenizer = Tokenizer(backend)
    text = "a b" * 2000

    assert tokenizer.encode(text) == [3] * 2000


def test_the_cache_stays_within_its_bound() -> None:
    tokenizer = Tokenizer(Backend.from_str(backend_json("byte_level")), cached_tokens_max=2000)
    for number in range(50):
        tokenizer.encode(f"{number} engine moves tokens " * 30)

    assert 0 < tokenizer._cache.cached_tokens <= 2000
    assert tokenizer._cache.cached_tokens == sum(len(ids) + PIECE_TOKENS for ids in tokenizer._cache._ids.values())


def test_many_threads_get_the_same_ids() -> None:
    tokenizer = Tokenizer.builtin()
    history = "<|im_start|>".join(tokenizer_training.training_text(random.Random(5)))[:20_000]
    texts_of_turns = [history[: 500 * turn] for turn in range(1, 41)] * 3
    expected = [Tokenizer.builtin().encode(text) for text in texts_of_turns[:40]] * 3

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts_of_turns)) == expected


def test_the_builtin_files_are_what_training_makes(tmp_path: Path) -> None:
    tokenizer_training.write(tmp_path)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (BUILTIN_DIRECTORY / name).read_bytes()


def test_anything_encoded_decodes_to_itself() -> None:
    tokenizer = Tokenizer.builtin()
    text = "<|im_start|>user\nnaïve 世界 🙂\t  x = 1\n<|im_end|>"

    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert max(tokenizer.encode(text)) < tokenizer.vocab_size


# --- Chats ---


def test_a_chat_renders_with_parts_joined_and_a_generation_prompt() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]

    rendered = Tokenizer.builtin().render_chat([{"role": "user", "content": parts}])

    assert rendered == "<|im_start|>user\nHello\nworld<|im_end|>\n<|im_start|>assistant\n"


def test_a_final_message_is_continued_where_it_ends() -> None:
    messages = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "one, two, "}]

    rendered = Tokenizer.builtin().render_chat(messages, add_generation_prompt=False, continue_final_message=True)

    assert rendered.endswith("<|im_start|>assistant\none, two, ")


def test_tool_arguments_are_objects_and_json_is_not_escaped() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"q": "<é>"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tool = {"type": "function", "function": {"parameters": {}, "name": "find"}}

    rendered = Tokenizer.builtin().render_chat(messages, tools=[tool])

    assert 'call find {"q": "<é>"}' in rendered
    assert '{"type": "function", "function": {"name": "find", "description": null, "parameters": {}}}' in rendered


def test_content_that_is_no_text_is_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}

    with pytest.raises(UnsupportedContentError, match="image_url"):
        Tokenizer.builtin().render_chat([{"role": "user", "content": [image]}])


@pytest.mark.parametrize(
    "messages",
    [
        [7],
        [{"content": "x"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{}]}],
        [{"role": "assistant", "tool_calls": 7}],
    ],
)
def test_what_is_no_chat_is_refused(messages: Any) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        Tokenizer.builtin().render_chat(messages)

    assert not isinstance(raised.value, TemplateRefusedError)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "ab"),
        ("{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}", "[a][b]"),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content | list %}[{{ p.text }}]{% endfor %}{% endfor %}", "[b]"),
        ("{{ bos_token }}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "<s>a"),
        ("{{ enable_thinking }}{{ sep_token is defined }}", "yesFalse"),
    ],
)  # fmt: skip
def test_templates_see_what_transformers_would_show_them(tmp_path: Path, template: str, expected: str) -> None:
    directory = _model_directory(tmp_path, {"bos_token": {"content": "<s>"}, "chat_template": template})

    rendered = Tokenizer.load(directory).render_chat(
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
        chat_template_kwargs={"enable_thinking": "yes"},
    )

    assert rendered == expected


def test_a_template_can_refuse_but_not_reach_out(tmp_path: Path) -> None:
    for template in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ):
        directory = _model_directory(tmp_path, {"chat_template": template})

        with pytest.raises(TemplateRefusedError):
            Tokenizer.load(directory).render_chat([{"role": "user", "content": "a"}])


def test_a_directory_without_a_usable_tokenizer_says_which_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerLoadError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(backend_json("byte_level"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_added_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    number = Backend.from_str(backend_json("byte_level")).get_vocab_size()
    listed = {str(number): {"content": "<|extra|>", "special": True, "normalized": False, "lstrip": False}}
    directory = _model_directory(tmp_path, {"added_tokens_decoder": listed})

    assert Tokenizer.load(directory).encode("<|extra|>", add_special_tokens=False) == [number]


def _model_directory(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "tokenizer.json").write_text(backend_json("byte_level"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _count_encoded_chars(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    backend = tokenizer._backend

    class Counting:
        def encode_batch_fast(self, batch: list[str], **options: Any) -> Any:
            counted.extend(map(len, batch))
            return backend.encode_batch_fast(batch, **options)

    monkeypatch.setattr(tokenizer._cache, "_backend", Counting())
    return counted
