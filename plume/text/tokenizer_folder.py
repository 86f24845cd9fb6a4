"""Tokenizer folders: what `transformers` and `tokenizers` write, read and open."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from plume.config import UserError
from plume.text.definition import BYTE_LETTERS, KNOWN_SPECIALS, WORD_END, Definition, Special, Words, with_specials
from plume.text.encoders import Ids, spacy_installed
from plume.text.tokenizer import Piece, Tokenizer
from plume.text.tokenizer_json import from_json, to_json
from plume.util.console import tell
from plume.util.files import write_text

# role -> the name that Hugging Face's files use for it
ROLE_FIELDS = {
    "start": "bos_token",
    "end": "eos_token",
    "pad": "pad_token",
    "mask": "mask_token",
    "unknown": "unk_token",
    "separator": "sep_token",
    "classify": "cls_token",
}
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt")
WORDS_FIELD = "plume_words"  # in tokenizer_config.json: what cut GPT-1's text into words


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a folder that holds tokenizer.json, vocab.json and merges.txt, or vocab.txt.

    A folder of prepared data and a run folder have one further down.
    """
    given = Path(folder)
    if not given.is_dir():
        raise UserError(
            f"there is no tokenizer folder {given}; make one with: plume tokenizer train FILES --out {given}"
        )
    places = (given, given / "tokenizer", given / "model")
    folder = next((place for place in places if any((place / name).exists() for name in VOCABULARIES)), given)
    config = _read_if_there(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").exists():
        return Tokenizer(_from_tokenizer_json(folder, config))
    if (folder / "vocab.json").exists():
        return Tokenizer(_with_added(_from_vocab_and_merges(folder, config), folder, config))
    if (folder / "vocab.txt").exists():
        return Tokenizer(_with_added(_from_vocab_txt(folder, config), folder, config))
    raise UserError(f"{folder} holds no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt, or vocab.txt")


class IdTokenizer(Tokenizer):
    """For weights without a tokenizer: token ids alone, shown as <17>."""

    def __init__(self, vocab_size: int, ends: Sequence[int] | None = None) -> None:
        super().__init__(Definition(kind="characters", tokens=tuple(f"<{i}>" for i in range(vocab_size))), ends)

    def __reduce__(self) -> tuple[Any, ...]:
        return IdTokenizer, (self.vocab_size, self.ends)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        raise UserError(
            "this model folder has no tokenizer, so it takes token ids and no text; "
            "plume import FOLDER --out NEW --tokenizer FOLDER adds one"
        )

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(self.encode(text)) for text in texts]

    def pieces(self, text: str) -> list[Piece]:
        self.encode(text)
        return []

    def save(self, folder: Path | str) -> None:
        """Write nothing: there is no tokenizer to keep."""


def tokenizer_of_model(folder: Path, vocab_size: int, ends: Sequence[int] | None) -> Tokenizer:
    """The tokenizer of a model folder, with its end tokens; where it has none, one that takes ids alone."""
    if any((folder / name).exists() for name in VOCABULARIES):
        definition = load_tokenizer(folder).definition
        written = [i for i in ends or () if i < len(definition.tokens)]  # rows without a token never are
        return Tokenizer(definition, written if written else None)
    tell(f"{folder} has no tokenizer ({', '.join(VOCABULARIES)}): only token ids can be used", sys.stderr)
    return IdTokenizer(vocab_size, ends)


def save_tokenizer(d: Definition, folder: Path) -> None:
    """Write a definition; each file is written aside and then takes its place."""
    folder.mkdir(parents=True, exist_ok=True)
    roles = {ROLE_FIELDS[role]: d.tokens[i] for role, i in d.roles.items()}
    segments = any(segment for _, segment in d.pair)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # reads tokenizer.json as it is, whatever the model
        "model_max_length": 10**30,  # the model's folder says how long a text may be, not the tokenizer's
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"],
        **roles,
    }
    if d.kind == "wordpiece":
        config |= {
            "do_lower_case": d.lowercase,
            "strip_accents": d.strip_accents,
            "tokenize_chinese_chars": d.split_cjk,
        }
    if d.words is not None:
        config[WORDS_FIELD] = d.words
    files = {
        "tokenizer.json": to_json(d),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(roles, ensure_ascii=False, indent=2) + "\n",
    }
    if d.kind == "wordpiece":
        files["vocab.txt"] = "".join(token + "\n" for token in d.tokens)
    elif d.kind in ("byte-bpe", "gpt1-bpe"):
        files["vocab.json"] = json.dumps(d.ids(), ensure_ascii=False)
        files["merges.txt"] = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in d.merges)
    for stale in {"vocab.txt", "vocab.json", "merges.txt"} - files.keys():
        (folder / stale).unlink(missing_ok=True)
    for name, content in files.items():
        write_text(folder / name, content)


def _from_tokenizer_json(folder: Path, config: Mapping[str, Any]) -> Definition:
    path = folder / "tokenizer.json"
    whole = _read_object(path)
    try:
        return from_json(whole, _roles(folder, config), _words(config))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer.json: {error!r} while reading it") from None


def _from_vocab_and_merges(folder: Path, config: Mapping[str, Any]) -> Definition:
    path = folder / "vocab.json"
    tokens = _by_id(path, _read_object(path))
    gpt1 = any(token.endswith(WORD_END) for token in tokens)
    if not gpt1 and not set(BYTE_LETTERS) <= set(tokens):
        raise UserError(
            f"{path} is neither a byte-level vocabulary (it lacks some of the 256 byte letters) "
            f"nor GPT-1's (no token ends in {WORD_END}); others, such as Marian's SentencePiece, need a tokenizer.json"
        )
    merges = _read_merges(folder / "merges.txt", set(tokens))
    if gpt1:
        d = Definition(kind="gpt1-bpe", tokens=tokens, merges=merges, lowercase=True, words=_words(config))
    else:
        d = Definition(kind="byte-bpe", tokens=tokens, merges=merges)
    return _with_named_specials(d, folder, config)


def _from_vocab_txt(folder: Path, config: Mapping[str, Any]) -> Definition:
    path = folder / "vocab.txt"
    tokens = tuple(line for line in _read(path).removesuffix("\n").split("\n"))
    if len(set(tokens)) != len(tokens):
        raise UserError(f"{path} has a token twice: {next(t for t in tokens if tokens.count(t) > 1)!r}")
    # BERT's files do not say whether they are cased, but an uncased vocabulary has no capital letter
    cased = any(token != token.lower() for token in tokens if token not in KNOWN_SPECIALS and not token.startswith("["))
    d = Definition(
        kind="wordpiece",
        tokens=tokens,
        lowercase=config.get("do_lower_case", not cased),
        strip_accents=config.get("strip_accents"),
        split_cjk=config.get("tokenize_chinese_chars", True),
    )
    return _with_named_specials(d, folder, config)


def _with_added(d: Definition, folder: Path, config: Mapping[str, Any]) -> Definition:
    """With the tokens that such folders list beside the vocabulary, read as tokenizer.json would have them."""
    try:
        listed = {one["id"]: one for one in _added_tokens(folder, config)}
        if all(i in d.added and d.tokens[i] == one["content"] for i, one in listed.items()):
            return d
        whole = json.loads(to_json(d))
        added = {one["id"]: one for one in whole["added_tokens"]} | listed
        return from_json(
            whole | {"added_tokens": [added[i] for i in sorted(added)]}, _roles(folder, config), _words(config)
        )
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{folder}: {error!r} while reading the added tokens") from None


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Older folders name their ids alone; newer ones also say how each is matched."""
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    more = _named(folder, config).get("additional_special_tokens", ())
    special = {*(_roles(folder, config) or {}).values(), *map(_text, more)}
    for text, i in _read_if_there(folder / "added_tokens.json").items():
        yield {**flags, "id": i, "content": text, "special": text in special, "normalized": text not in special}
    for i, one in config.get("added_tokens_decoder", {}).items():
        yield {**flags, "normalized": False, "special": False, **one, "id": int(i)}


def _with_named_specials(d: Definition, folder: Path, config: Mapping[str, Any]) -> Definition:
    """The specials that the folder's files name, or else those with the usual names."""
    roles = _roles(folder, config)
    present = [KNOWN_SPECIALS[token] for token in d.tokens if token in KNOWN_SPECIALS]
    if roles is not None:
        named: dict[str, list[str]] = {}
        for role, text in roles.items():
            named.setdefault(text, []).append(role)
        lstrip = {s.text: s.lstrip for s in present}
        present = [Special(t, tuple(r), lstrip.get(t, False)) for t, r in named.items() if t in d.tokens]
    d = with_specials(d, present)
    if d.kind != "byte-bpe" and "unknown" not in d.roles:
        raise UserError(f"the vocabulary in {folder} has no token for the unknown, such as <unk> or [UNK]")
    return d


def _roles(folder: Path, config: Mapping[str, Any]) -> dict[str, str] | None:
    """role -> token as the folder's files name it; None where they name none."""
    named = _named(folder, config)
    texts = {role: _text(named.get(field)) for role, field in ROLE_FIELDS.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)} or None


def _named(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config) | _read_if_there(folder / "special_tokens_map.json")


def _text(token: Any) -> Any:
    """The text of a token, which some files write with its flags."""
    return token.get("content") if isinstance(token, dict) else token


def _words(config: Mapping[str, Any]) -> Words:
    """What cuts GPT-1's text into words: as the folder says, else as the original did if that can be done here."""
    recorded = config.get(WORDS_FIELD)
    if recorded == "basic" or (recorded != "spacy" and not spacy_installed()):
        return "basic"
    return "spacy"


def _by_id(path: Path, ids: Mapping[str, Any]) -> tuple[str, ...]:
    if wrong := [i for i in ids.values() if type(i) is not int]:
        raise UserError(f"{path}: {wrong[0]!r} is not a token's id")
    tokens = sorted(ids, key=ids.__getitem__)
    if [ids[token] for token in tokens] != list(range(len(tokens))):
        gap = next(n for n, token in enumerate(tokens) if ids[token] != n)
        raise UserError(f"{path}: the ids are not 0 to {len(tokens) - 1}, each once; the first that is wrong is {gap}")
    return tuple(tokens)


def _read_merges(path: Path, tokens: set[str]) -> tuple[tuple[str, str], ...]:
    merges = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not {*pair, pair[0] + pair[1]} <= tokens:
            raise UserError(f"{path}, line {number}: {line!r} is not a merge of two tokens of vocab.json into a third")
        merges.append((pair[0], pair[1]))
    return tuple(merges)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is wrong") from None


def _read_if_there(path: Path) -> dict[str, Any]:
    return _read_object(path) if path.exists() else {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not whole JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value
