"""Text to token ids and back, as a checkpoint says: vocabulary, chat template."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers.decoders import ByteLevel, DecodeStream
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from kvjax.model.checkpoint import Checkpoint

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A vocabulary with what a model expects around a prompt.

    Attributes:
      backend: Encodes and decodes; its post-processor adds what begins a raw text.
      chat_template: Jinja source, or None if the model has none.
      named_tokens: Texts that a template may use: "bos_token", "eos_token".
    """

    backend: tokenizers.Tokenizer
    chat_template: str | None = None
    named_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Ids of a user's message in the chat template, or of the bare text if `raw`.

        Raises:
          ValueError: the model has no chat template, or the template refuses.
        """
        if not raw:
            return self.encode_chat([{"role": "user", "content": text}])
        return self.backend.encode(text, add_special_tokens=True).ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's next answer begins.

        Args:
          messages: Each has "role" (system, user or assistant) and "content".

        Raises:
          ValueError: as `encode`.
        """
        if self.chat_template is None:
            raise ValueError("the model has no chat template: encode with raw=True")
        text = render_chat(self.chat_template, messages, self.named_tokens)
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt_ids: Sequence[int] = ()) -> "TextStream":
        """Decodes what follows a prompt, a token at a time."""
        return TextStream(self.backend, prompt_ids)


class TextStream:
    """Text as tokens arrive. Bytes of an unfinished character wait for the rest."""

    def __init__(self, backend: tokenizers.Tokenizer, prompt_ids: Sequence[int] = ()):
        prompt_ids = list(prompt_ids)
        if backend.decode(prompt_ids).endswith("\N{REPLACEMENT CHARACTER}"):
            prompt_ids = []  # DecodeStream would repeat a prompt cut within a character
        self._backend = backend
        self._decoder = DecodeStream(ids=prompt_ids, skip_special_tokens=True)
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; often empty."""
        self._waiting.append(token)
        text = self._decoder.step(self._backend, token)
        if text is None:
            return ""
        self._waiting.clear()
        return text

    def finish(self) -> str:
        """The text of what still waits: replacement characters for half a character."""
        text = self._backend.decode(self._waiting, skip_special_tokens=True)
        self._waiting.clear()
        return text


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    named_tokens: Mapping[str, str],
) -> str:
    """Applies a chat template in a sandbox, with what transformers gives one.

    Raises:
      ValueError: the template has an error or calls `raise_exception`.
    """
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_template_error
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return env.from_string(template).render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **named_tokens,
        )
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template failed: {error}") from error


def _to_json(value: Any, *, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_template_error(message: str):
    raise jinja2.TemplateError(message)


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that an opened model brings.

    Raises:
      ValueError: it brings none, or one that isn't supported.
    """
    if checkpoint.path.is_dir():
        return from_directory(checkpoint.path)
    return from_gguf(checkpoint.metadata)


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the byte-level BPE that a GGUF file's metadata describes.

    Args:
      metadata: The file's keys; those read begin with `tokenizer.`.

    Raises:
      ValueError: a key is missing, or the model or pre-tokenizer is not supported.
    """
    model, pre = (
        _wanted(metadata, f"tokenizer.ggml.{key}") for key in ("model", "pre")
    )
    if model != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model {model!r} is not supported; supported: 'gpt2'"
        )
    if pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported: "
            f"{sorted(PRE_TOKENIZERS)}"
        )
    rules = PRE_TOKENIZERS[pre]
    tokens = _wanted(metadata, "tokenizer.ggml.tokens")
    merges = _wanted(metadata, "tokenizer.ggml.merges")
    backend = tokenizers.Tokenizer(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=rules.ignore_merges,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(rules.split())
    backend.decoder = ByteLevel()
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    _add_tokens(backend, tokens, _wanted(metadata, "tokenizer.ggml.token_type"))
    named = {
        name: tokens[metadata[key]]
        for name in ("bos_token", "eos_token")
        if (key := f"tokenizer.ggml.{name}_id") in metadata
    }
    if metadata.get("tokenizer.ggml.add_bos_token", rules.add_bos):
        _begin_with(backend, named)
    return Tokenizer(
        backend=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        named_tokens=named,
    )


def _wanted(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(f"the GGUF file lacks {key!r}, which its tokenizer needs")
    return metadata[key]


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]
) -> None:
    """Makes control and user-defined tokens whole: nothing splits or merges them."""
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == wanted
        ]
        add = backend.add_special_tokens if special else backend.add_tokens
        add(added)


def _begin_with(backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> None:
    if "bos_token" not in named:
        raise ValueError(
            "tokenizer.ggml.add_bos_token is set, tokenizer.ggml.bos_token_id is not"
        )
    bos = named["bos_token"]
    backend.post_processor = TemplateProcessing(
        single=f"{bos}:0 $A:0", special_tokens=[(bos, backend.token_to_id(bos))]
    )


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """What a value of tokenizer.ggml.pre stands for, after llama.cpp's llama-vocab.cpp.

    Attributes:
      split: Makes the steps that cut a text into pieces before any merge.
      ignore_merges: A piece of the vocabulary is one token, whatever the merges.
      add_bos: Whether a text begins with the bos token if the file doesn't say.
      nfc: Whether the published tokenizer normalizes to NFC.
    """

    split: Callable[[], list[pre_tokenizers.PreTokenizer]]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


def _digits_then_words() -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]


def _words(digits: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return lambda: [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


PRE_TOKENIZERS = {
    "smollm": PreTokenizer(split=_digits_then_words),
    "llama-bpe": PreTokenizer(
        split=_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True
    ),
    "qwen2": PreTokenizer(split=_words(r"\p{N}"), nfc=True),
}


def from_directory(path: str | Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face model directory.

    Reads tokenizer.json and, where they exist, tokenizer_config.json and
    chat_template.jinja.

    Raises:
      ValueError: tokenizer.json is missing, or names a form that isn't supported.
    """
    path = Path(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{path} has no tokenizer.json, which its tokenizer needs")
    backend = tokenizers.Tokenizer.from_file(str(file))
    config = _read_json(path / "tokenizer_config.json")
    named = {
        name: _text(config[name])
        for name in ("bos_token", "eos_token")
        if config.get(name) is not None
    }
    return Tokenizer(
        backend=backend,
        chat_template=_chat_template(path, config),
        named_tokens=named,
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        templates = {entry["name"]: entry["template"] for entry in template}
        if "default" not in templates:
            raise ValueError(
                f"tokenizer_config.json needs a chat template named 'default', got "
                f"{sorted(templates)}"
            )
        return templates["default"]
    return template
