"""The tokenizer against a slow one written from the rules, and its text streams."""

import functools
import json
import unicodedata

import gguf
import pytest

from kvjax.model import tokenizer as tok
from kvjax.model.checkpoint import find_smollm2

TEXTS = {
    "prose": "It was the best of times, it was the worst of times; we'll see they're.",
    "digits": "In 2024, 3.14159 x 10^23 and 1,000,000; v2.0.1 \u0664\u0665 \u00bd.",
    "spaces": "a  b   c \t d\u00a0e\u3000f   ",
    "newlines": "\n\none\n  two\r\n\r\n\tthree\n\n\n",
    "code": "def f(x):\n    return x**2 if x != 10 else f'{x:>08.3f}'  # note\n",
    "unicode": "na\u00efve \u00fcber \u4e2d\u6587\u5b57 \u0440\u0443 \u05e2\u05d1",
    "combining": "e\u0301 n\u0303 \u1ed9",
    "emoji": "hi \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea!",
    "apostrophes": "I'll can't he's 'tis ''s 'S '99 they'd've",
    "punctuation": "...!!! (a) [b] {c} <d/> -- == => && || \\ / %$#@",
    "special": "<|im_start|>user\nhi<|im_end|> <|im_end <|endoftext|>",
    "empty": "",
}
WHITE_SPACE = set("\t\n\v\f\r \u0085\u00a0\u1680\u2028\u2029\u202f\u205f\u3000") | {
    chr(c) for c in range(0x2000, 0x200B)
}


@functools.cache
def smollm2_metadata() -> dict:
    fields = gguf.GGUFReader(find_smollm2()).fields
    wanted = [key for key in fields if key.startswith("tokenizer.")]
    return {key: fields[key].contents() for key in wanted}


@pytest.fixture(scope="module")
def smollm2() -> tok.Tokenizer:
    return tok.from_gguf(smollm2_metadata())


def kind(char: str) -> str:
    """L, N, space or other, of a character."""
    if char in WHITE_SPACE:
        return "space"
    category = unicodedata.category(char)[0]
    return category if category in "LN" else "other"


def split_digits(text: str) -> list[str]:
    pieces = [""]
    for char in text:
        if kind(char) == "N":
            pieces += [char, ""]
        else:
            pieces[-1] += char
    return [piece for piece in pieces if piece]


def split_words(text: str) -> list[str]:
    """GPT-2's pattern by hand: suffix, words with a space before, runs of spaces.

    's|'t|'re|'ve|'m|'ll|'d| ?L+| ?N+| ?other+|spaces not before a word|spaces
    """
    pieces, i = [], 0
    while i < len(text):
        suffix = next((s for s in SUFFIXES if text.startswith(s, i)), None)
        if suffix is not None:
            end = i + len(suffix)
        else:
            start = i + (text[i] == " " and i + 1 < len(text))
            if kind(text[start]) == "space":
                start = i
            end = start
            while end < len(text) and kind(text[end]) == kind(text[start]):
                end += 1
            if kind(text[start]) == "space" and end < len(text) and end - i > 1:
                end -= 1
        pieces.append(text[i:end])
        i = end
    return pieces


SUFFIXES = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


def byte_letters() -> dict[int, str]:
    """GPT-2's letter for each byte: itself if printable, else the next beyond 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def merge(letters: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    """Merges the pair of the lowest rank, leftmost first, until none is left."""
    while True:
        pairs = list(zip(letters, letters[1:]))
        known = [(ranks[pair], i) for i, pair in enumerate(pairs) if pair in ranks]
        if not known:
            return letters
        i = min(known)[1]
        letters = [*letters[:i], letters[i] + letters[i + 1], *letters[i + 2 :]]


def slow_encode(text: str, metadata: dict) -> list[int]:
    """Ids by the rules: whole special tokens, digits, words, bytes, merges."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types) if kind == 3]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = metadata["tokenizer.ggml.merges"]
    ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
    letters = byte_letters()
    found, i = [], 0
    while i < len(text):
        whole = [token for token in special if text.startswith(token, i)]
        if whole:
            found.append(ids[max(whole, key=len)])
            i += len(max(whole, key=len))
            continue
        starts = [text.find(token, i) for token in special]
        end = min((start for start in starts if start >= 0), default=len(text))
        for piece in split_digits(text[i:end]):
            for word in split_words(piece):
                parts = merge([letters[b] for b in word.encode()], ranks)
                found += [ids[part] for part in parts]
        i = end
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_ids_equal_those_of_the_written_rules(smollm2, name):
    assert smollm2.encode(TEXTS[name], raw=True) == slow_encode(
        TEXTS[name], smollm2_metadata()
    )


def test_every_digit_is_its_own_token(smollm2):
    pieces = [smollm2.decode([i]) for i in smollm2.encode("pi = 3141592", raw=True)]
    assert pieces[-7:] == list("3141592")


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "special"])
def test_decode_undoes_encode(smollm2, name):
    assert smollm2.decode(smollm2.encode(TEXTS[name], raw=True)) == TEXTS[name]


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "special"])
@pytest.mark.parametrize("prompt", ["", "Say: ", "\u4e2d", "<|im_start|>"])
def test_streamed_pieces_join_to_the_text(smollm2, name, prompt):
    stream = smollm2.stream(smollm2.encode(prompt, raw=True))
    pieces = [stream.push(i) for i in smollm2.encode(TEXTS[name], raw=True)]
    assert "".join(pieces) + stream.finish() == TEXTS[name]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_character_of_several_tokens_appears_with_its_last(smollm2):
    ids = smollm2.encode("\U0001f467", raw=True)
    assert len(ids) > 1
    stream = smollm2.stream()
    assert [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["\U0001f467"]


def test_finish_shows_half_a_character(smollm2):
    stream = smollm2.stream()
    assert stream.push(smollm2.encode("\U0001f467", raw=True)[0]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"
    assert stream.finish() == ""


def test_a_stream_never_repeats_a_prompt_cut_within_a_character(smollm2):
    ids = smollm2.encode("long prompt \U0001f467 yes", raw=True)
    cut = next(i for i in range(1, len(ids)) if smollm2.decode(ids[:i])[-1] == "\ufffd")
    stream = smollm2.stream(ids[:cut])
    text = "".join(stream.push(i) for i in ids[cut:])
    assert "prompt" not in text
    assert text.endswith(" yes")


def test_special_tokens_stay_out_of_the_stream(smollm2):
    ids = smollm2.encode("a<|im_end|>b", raw=True)
    assert len(ids) == 3
    stream = smollm2.stream()
    assert [stream.push(i) for i in ids] == ["a", "", "b"]


def test_a_message_goes_into_the_chat_template(smollm2):
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nHi 12!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert smollm2.encode("Hi 12!") == slow_encode(text, smollm2_metadata())


def test_a_conversation_keeps_its_roles_and_order(smollm2):
    ids = smollm2.encode_chat(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "3?"},
        ]
    )
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n3?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids == slow_encode(text, smollm2_metadata())


def test_the_vocabulary_is_the_models(smollm2):
    assert smollm2.vocab_size == 49152


def small_metadata(**changes) -> dict:
    """A vocabulary of all bytes, one merge (a, b), two special tokens."""
    tokens = [*byte_letters().values(), "ab", "<bos>", "<eot>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    } | changes


def pieces(tokenizer: tok.Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text, raw=True)]


def words(pre: str, text: str) -> list[str]:
    steps = tok.from_gguf(small_metadata(**{"tokenizer.ggml.pre": pre})).backend
    cuts = steps.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cuts]


@pytest.mark.parametrize(
    "pre, expected",
    [
        (
            "smollm",
            ["We", "'ll", " see", " ", "1", "2", "3", "4", "?\n\n", " it", "'", "S"],
        ),
        ("llama-bpe", ["We", "'ll", " see", " ", "123", "4", "?\n\n", " it", "'S"]),
        ("qwen2", ["We", "'ll", " see", " ", "1", "2", "3", "4", "?\n\n", " it", "'S"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_model_does(pre, expected):
    if pre == "smollm":  # GPT-2's words don't take newlines along
        at = expected.index("?\n\n")
        expected = [*expected[:at], "?", "\n\n", *expected[at + 1 :]]
    assert words(pre, "We'll see 1234?\n\n it'S") == expected


def test_llama_bpe_begins_a_raw_text_with_bos_and_ignores_merges():
    tokens = [*byte_letters().values(), "ab", "<bos>", "<eot>", "abc"]
    data = small_metadata(
        **{"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tokens}
    ) | {"tokenizer.ggml.token_type": [1] * 257 + [3, 3, 1]}
    assert pieces(tok.from_gguf(data), "abc") == ["<bos>", "abc"]
    without = data | {"tokenizer.ggml.pre": "qwen2"}
    assert pieces(tok.from_gguf(without), "abc") == ["ab", "c"]


@pytest.mark.parametrize("add, first", [(True, ["<bos>"]), (False, [])])
def test_add_bos_of_the_file_rules(add, first):
    data = small_metadata(**{"tokenizer.ggml.add_bos_token": add})
    assert pieces(tok.from_gguf(data), "ab") == [*first, "ab"]


def test_chat_templates_name_their_own_bos():
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    data = small_metadata(
        **{"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": template}
    )
    assert tok.from_gguf(data).encode("ab") == [257, 256]


def test_user_defined_tokens_are_whole_but_shown():
    tokenizer = tok.from_gguf(small_metadata())
    assert tokenizer.encode("<tool>ab", raw=True) == [259, 256]
    assert tokenizer.decode([259, 258, 256]) == "<tool>ab"


def test_qwen2_normalizes_to_nfc():
    tokenizer = tok.from_gguf(small_metadata(**{"tokenizer.ggml.pre": "qwen2"}))
    assert tokenizer.decode(tokenizer.encode("e\u0301", raw=True)) == "\u00e9"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tokenizer.ggml.pre": "gpt-5"}, "'gpt-5' is not supported"),
        ({"tokenizer.ggml.pre": "default"}, "'default' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "'llama' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        tok.from_gguf(small_metadata(**changes))


@pytest.mark.parametrize(
    "key", ["tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.token_type"]
)
def test_a_missing_key_is_named(key):
    data = small_metadata()
    del data[key]
    with pytest.raises(ValueError, match=key):
        tok.from_gguf(data)


def test_no_chat_template_says_what_to_do():
    with pytest.raises(ValueError, match="raw=True"):
        tok.from_gguf(small_metadata()).encode("hi")


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "template failed"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "template failed"),
    ],
)
def test_a_template_that_fails_is_a_value_error(template, message):
    data = small_metadata(**{"tokenizer.chat_template": template})
    with pytest.raises(ValueError, match=message):
        tok.from_gguf(data).encode("hi")


def test_templates_get_what_transformers_gives_them():
    template = (
        "{% for m in messages %}\n"
        "  {% if loop.last %}{{ m | tojson }}{% break %}{% endif %}\n"
        "{% endfor %}\n"
        "{% if tools %}tools{% endif %}{{ strftime_now('%%') }}"
    )
    assert (
        tok.render_chat(template, [{"content": "\u00fc<"}], {})
        == '{"content": "\u00fc<"}%'
    )


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory of the small vocabulary."""
    tokenizer = tok.from_gguf(small_metadata())
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))

    def write(**files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_a_directory_gives_the_same_ids(directory):
    tokenizer = tok.from_directory(directory())
    assert pieces(tokenizer, "cab <eot>") == ["c", "ab", "\u0120", "<eot>"]


def test_a_directorys_template_and_tokens_are_read(directory):
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    path = directory(
        tokenizer_config={
            "chat_template": [
                {"name": "tool_use", "template": "no"},
                {"name": "default", "template": template},
            ],
            "bos_token": {"content": "<bos>"},
            "eos_token": "<eot>",
        }
    )
    assert tok.from_directory(path).encode("ab") == [257, 256, 258]
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tok.from_directory(path).encode("ab") == [256]


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json"):
        tok.from_directory(tmp_path)
