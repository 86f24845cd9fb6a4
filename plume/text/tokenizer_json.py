"""A definition to and from the text of `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from plume.text.definition import (
    BYTE_KINDS,
    BYTE_LETTERS,
    CONTINUES,
    KNOWN_SPECIALS,
    LONGEST_WORD,
    WORD_END,
    Definition,
    Kind,
    Special,
    Template,
    Words,
)

Json = Mapping[str, Any]
MOST_TOKENS = 1 << 26  # far above any vocabulary; a larger id would take all memory


def to_json(d: Definition) -> str:
    """The whole tokenizer.json."""
    if d.library is not None:
        return d.library
    model = model_section(d) | {"vocab": d.ids()} | ({} if d.kind == "wordpiece" else {"merges": d.merges})
    flags = {"single_word": False, "rstrip": False, "normalized": False, "special": True}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": s.text, "lstrip": s.lstrip, **flags} for i, s in d.added.items()],
        **text_sections(d),
        "post_processor": template_section(d),
        "model": model,
    }
    return json.dumps(whole, ensure_ascii=False)


def model_section(d: Definition) -> dict[str, Any]:
    """How a word becomes pieces, without the vocabulary."""
    unknown = None if d.kind in BYTE_KINDS else d.tokens[d.roles["unknown"]]
    if d.kind == "wordpiece":
        return {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": CONTINUES,
            "max_input_chars_per_word": LONGEST_WORD,
        }
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": WORD_END if d.kind == "gpt1-bpe" else None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }


def text_sections(d: Definition) -> dict[str, Any]:
    """How a text becomes words, and pieces a text again."""
    if d.kind in BYTE_KINDS:
        use_regex = d.kind == "byte-bpe"
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
        return {"normalizer": None, "pre_tokenizer": level, "decoder": level}
    if d.kind == "characters":
        return {"normalizer": None, "pre_tokenizer": None, "decoder": {"type": "Fuse"}}
    decoders = {
        "gpt1-bpe": {"type": "BPEDecoder", "suffix": WORD_END},
        "wordpiece": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
    }
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": d.clean_text,
        "handle_chinese_chars": d.split_cjk,
        "strip_accents": d.strip_accents,
        "lowercase": d.lowercase,
    }
    return {"normalizer": normalizer, "pre_tokenizer": {"type": "BertPreTokenizer"}, "decoder": decoders[d.kind]}


def template_section(d: Definition) -> dict[str, Any] | None:
    """Templates around one text and around two."""
    if d.single == Definition.single:
        return None
    used = {part: d.tokens[part] for part, _ in d.pair if isinstance(part, int)}

    def written(template: Template) -> list[dict[str, Any]]:
        return [
            {"SpecialToken": {"id": used[part], "type_id": segment}}
            if isinstance(part, int)
            else {"Sequence": {"id": part, "type_id": segment}}
            for part, segment in template
        ]

    return {
        "type": "TemplateProcessing",
        "single": written(d.single),
        "pair": written(d.pair),
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for i, token in used.items()},
    }


def from_json(whole: Json, roles: Mapping[str, str] | None, words: Words) -> Definition:
    """The definition behind a tokenizer.json; what Plume does not know exactly is left to the library.

    `roles` names the special of each role; unset means that the usual names tell it.
    """
    ids: dict[str, int] = dict(_vocabulary(whole["model"])) | {a["content"]: a["id"] for a in whole["added_tokens"]}
    if wrong := [i for i in ids.values() if not 0 <= i < MOST_TOKENS]:
        raise ValueError(f"{wrong[0]} as a token's id")
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, i in ids.items():
        tokens[i] = token
    special = {a["content"]: Special(a["content"], lstrip=a["lstrip"]) for a in whole["added_tokens"] if a["special"]}
    if roles is None:
        roles = {role: text for text in special for role in KNOWN_SPECIALS.get(text, Special(text)).roles}
    single, pair = _read_template(whole.get("post_processor"), ids)
    d = Definition(
        kind="library",
        tokens=tuple(tokens),
        roles={role: ids[text] for role, text in roles.items() if text in ids},
        added={i: special[text] for i, text in sorted((ids[text], text) for text in special)},
        single=single,
        pair=pair,
    )
    gapless = sorted(ids.values()) == list(range(len(ids)))
    known = _known(d, whole, words) if gapless and all(_plain(a, whole) for a in whole["added_tokens"]) else None
    if known is not None:
        return known
    unbounded = dict(whole) | {"truncation": None, "padding": None}
    return replace(d, library=json.dumps(unbounded, ensure_ascii=False, sort_keys=True))


def _known(d: Definition, whole: Json, words: Words) -> Definition | None:
    """The same as one of Plume's kinds, if writing that kind would give the same sections back."""
    kind = _kind(whole)
    if kind is None or (kind not in BYTE_KINDS and "unknown" not in d.roles):
        return None
    if kind in BYTE_KINDS and d.roles.get("unknown") == d.roles.get("end"):  # as GPT-2's files say for want of one
        d = replace(d, roles={role: i for role, i in d.roles.items() if role != "unknown"})
    d = replace(d, kind=kind, merges=_merges(whole["model"]), words=words if kind == "gpt1-bpe" else None)
    if kind in ("gpt1-bpe", "wordpiece"):
        normalizer = whole["normalizer"]
        d = replace(
            d,
            lowercase=normalizer["lowercase"],
            strip_accents=normalizer["strip_accents"],
            split_cjk=normalizer["handle_chinese_chars"],
            clean_text=normalizer["clean_text"],
        )
    ours = text_sections(d)
    same = (
        _bare(whole.get("normalizer")) == _bare(ours["normalizer"])
        and _bare(whole.get("pre_tokenizer")) == _bare(ours["pre_tokenizer"])
        and _bare(whole["model"], kind) == _bare(model_section(d), kind)
    )
    return d if same else None


def _kind(whole: Json) -> Kind | None:
    model, cutter = whole["model"], (whole.get("pre_tokenizer") or {}).get("type")
    normalizer = (whole.get("normalizer") or {}).get("type")
    if cutter == "BertPreTokenizer" and normalizer == "BertNormalizer":
        return {"WordPiece": "wordpiece", "BPE": "gpt1-bpe"}.get(model.get("type"))  # type: ignore[return-value]
    if model.get("type") != "BPE" or normalizer is not None:
        return None
    if cutter == "ByteLevel" and set(BYTE_LETTERS) <= model["vocab"].keys():
        return "byte-bpe" if whole["pre_tokenizer"].get("use_regex", True) else "bytes"
    single_letters = not _merges(model) and all(
        len(token) == 1 for token in model["vocab"].keys() - {a["content"] for a in whole["added_tokens"]}
    )
    return "characters" if cutter is None and single_letters else None


def _bare(section: Json | None, kind: Kind | None = None) -> dict[str, Any]:
    """A section without what changes no id: empty values, offsets, and the unknown where nothing is unknown."""
    idle = {"vocab", "merges", "trim_offsets"} | (
        {"unk_token", "fuse_unk", "byte_fallback"} if kind in BYTE_KINDS else set()
    )
    defaults = {"use_regex": True} if section is not None and section.get("type") == "ByteLevel" else {}
    given = defaults | dict(section or {})
    return {key: value for key, value in given.items() if key not in idle and value not in (None, "", False)}


def _plain(added: Json, whole: Json) -> bool:
    """Whether a token of the added list is an ordinary special, matched as it is."""
    normalized = added["normalized"] and whole.get("normalizer") is not None
    return bool(added["special"]) and not (added["rstrip"] or added["single_word"] or normalized)


def _vocabulary(model: Json) -> Mapping[str, int]:
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score
        return {token: i for i, (token, _) in enumerate(vocabulary)}
    return dict(vocabulary)


def _merges(model: Json) -> tuple[tuple[str, str], ...]:
    """Merges are pairs; older files write them as one string with a space between."""
    return tuple(
        (merge.split(" ")[0], merge.split(" ")[1]) if isinstance(merge, str) else (merge[0], merge[1])
        for merge in model.get("merges") or ()
    )


def _read_template(section: Json | None, ids: Mapping[str, int]) -> tuple[Template, Template]:
    if section is None or section["type"] == "ByteLevel":
        return Definition.single, Definition.pair
    if section["type"] == "Sequence":
        read = [_read_template(s, ids) for s in section["processors"]]
        return next((r for r in read if r[0] != Definition.single), (Definition.single, Definition.pair))
    if section["type"] in ("BertProcessing", "RobertaProcessing"):
        classify, separator = section["cls"][1], section["sep"][1]
        single: Template = ((classify, 0), ("A", 0), (separator, 0))
        if section["type"] == "RobertaProcessing":
            return single, (*single, (separator, 0), ("B", 0), (separator, 0))
        return single, (*single, ("B", 1), (separator, 1))
    specials = section["special_tokens"]

    def read_parts(parts: Sequence[Json]) -> Template:
        read: list[tuple[int | str, int]] = []
        for part in parts:
            if "Sequence" in part:
                read.append((part["Sequence"]["id"], part["Sequence"]["type_id"]))
            else:
                inner = part["SpecialToken"]
                read += [(i, inner["type_id"]) for i in specials[inner["id"]]["ids"]]
        return tuple(read)

    single = read_parts(section["single"])
    return (
        (Definition.single, Definition.pair) if single == Definition.single else (single, read_parts(section["pair"]))
    )
