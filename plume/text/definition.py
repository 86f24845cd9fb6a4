"""What a tokenizer is, as plain data: vocabulary, merges, specials and options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Literal

from plume.config import SpecialTokens

Kind = Literal["byte-bpe", "gpt1-bpe", "wordpiece", "characters", "bytes", "library"]
Layout = SpecialTokens
Words = Literal["spacy", "basic"]
Part = tuple[int | str, int]  # a special's id, or "A" or "B" for a text; and its segment
Template = tuple[Part, ...]

BYTE_KINDS = ("byte-bpe", "bytes")  # these spell any text, so nothing is unknown to them
WORD_END = "</w>"  # closes a word in GPT-1's vocabulary
CONTINUES = "##"  # opens a piece inside a word in WordPiece's vocabulary
LONGEST_WORD = 100  # characters; WordPiece calls a longer word unknown


@dataclass(frozen=True)
class Special:
    """A token that plain text never produces."""

    text: str
    roles: tuple[str, ...] = ()
    lstrip: bool = False  # swallows the white space before it, as RoBERTa's mask does


# name -> specials before the vocabulary, specials after it
LAYOUTS: dict[Layout, tuple[list[Special], list[Special]]] = {
    "gpt1": ([Special("<unk>", ("unknown",))], []),
    "gpt2": ([], [Special("<|endoftext|>", ("start", "end"))]),
    "bert": (
        [
            Special("[PAD]", ("pad",)),
            Special("[UNK]", ("unknown",)),
            Special("[CLS]", ("classify",)),
            Special("[SEP]", ("separator",)),
            Special("[MASK]", ("mask",)),
        ],
        [],
    ),
    "roberta": (
        [
            Special("<s>", ("start", "classify")),
            Special("<pad>", ("pad",)),
            Special("</s>", ("end", "separator")),
            Special("<unk>", ("unknown",)),
        ],
        [Special("<mask>", ("mask",), lstrip=True)],
    ),
}
KNOWN_SPECIALS = {s.text: s for before, after in LAYOUTS.values() for s in (*before, *after)}


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Everything that decides which ids a text gets."""

    kind: Kind
    tokens: tuple[str, ...]  # by id, spelled as in tokenizer.json
    merges: tuple[tuple[str, str], ...] = ()
    roles: Mapping[str, int] = field(default_factory=dict)
    added: Mapping[int, Special] = field(default_factory=dict)  # every special, with or without a role
    single: Template = (("A", 0),)  # template around one text
    pair: Template = (("A", 0), ("B", 0))
    lowercase: bool = False
    strip_accents: bool | None = None  # unset means: as `lowercase`
    split_cjk: bool = True
    clean_text: bool = True
    words: Words | None = None  # what cuts GPT-1's text into words
    library: str | None = None  # the tokenizer.json of a tokenizer that only the `tokenizers` library can run

    def hash(self) -> str:
        """The same for the same ids, whichever files they were read from."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}  # asdict copies every token, which takes a second
        plain = json.dumps(
            own | {"added": {i: asdict(s) for i, s in self.added.items()}}, sort_keys=True, separators=(",", ":")
        )
        return hashlib.sha256(plain.encode()).hexdigest()

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}


def byte_letters() -> list[str]:
    """GPT-2's visible letter for every byte: itself where it can be printed, else the next one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


BYTE_LETTERS = byte_letters()
LETTER_BYTES = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}


def layout_specials(kind: Kind, layout: Layout) -> tuple[list[Special], list[Special]]:
    """The specials of a layout, and one for the unknown where the kind needs it."""
    before, after = LAYOUTS[layout]
    if kind not in BYTE_KINDS and not any("unknown" in s.roles for s in before):
        before = [Special("<unk>", ("unknown",)), *before]
    return before, after


def define(kind: Kind, body: Iterable[str], merges: Iterable[tuple[str, str]], layout: Layout) -> Definition:
    """A definition with the specials of a layout around the body of the vocabulary."""
    before, after = layout_specials(kind, layout)
    tokens = [*(s.text for s in before), *body, *(s.text for s in after)]
    bare = Definition(kind=kind, tokens=tuple(tokens), merges=tuple(merges))
    return with_specials(bare, [*before, *after])


def with_specials(d: Definition, specials: Iterable[Special]) -> Definition:
    """The same vocabulary with these of its tokens as specials, and around a text what their roles ask for."""
    ids = d.ids()
    specials = sorted(specials, key=lambda s: ids[s.text])
    added = {ids[s.text]: replace(s, roles=()) for s in specials}
    roles = {role: ids[s.text] for s in specials for role in s.roles}
    single, pair = _templates(roles)
    return replace(d, added=added, roles=roles, single=single, pair=pair)


def _templates(roles: Mapping[str, int]) -> tuple[Template, Template]:
    """BERT: [CLS] A [SEP] B [SEP]; RoBERTa, whose start is what it classifies by: <s> A </s></s> B </s>; GPT: bare."""
    if "classify" not in roles or "separator" not in roles:
        return Definition.single, Definition.pair
    classify, separator = roles["classify"], roles["separator"]
    single: Template = ((classify, 0), ("A", 0), (separator, 0))
    if roles.get("start") == classify:
        return single, (*single, (separator, 0), ("B", 0), (separator, 0))
    return single, (*single, ("B", 1), (separator, 1))
