"""How a row of each data set becomes items, as lm-evaluation-harness and the papers format it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from plume.config import UserError
from plume.evaluate.items import (
    Blank,
    Item,
    Judgement,
    LastWord,
    MultipleChoice,
    Passage,
    Question,
    ScoringProtocol,
    TaskRow,
    choice,
)

LETTERS = "ABCDEFGH"
LANGUAGES = {"de": "German", "en": "English", "fr": "French"}
FILL = "Fill in blank:\n\n"
NEW_TOKENS = 256  # what the harness writes where a task does not say how much
BEAMS = 4  # GPT-3's free answers


# ---- the last word -----------------------------------------------------------------------------------------------


def lambada(row: TaskRow, protocol: ScoringProtocol) -> Iterator[LastWord]:
    words = row.text("text").split(" ")
    if len(words) < 2:
        raise UserError(f"{row.where}: a text of one word has no last word to predict")
    context, word = " ".join(words[:-1]), " " + words[-1]
    if protocol.cloze:
        yield LastWord(where=row.where, opening=FILL, context=f"{context} ____. ->", word=word)
    else:
        # the harness puts its own blank before one that is there already, though in examples only
        yield LastWord(where=row.where, context=context, word=word, gap=" " if protocol.name == "harness" else "")


def lambada_fill(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Blank]:
    before, _, word = row.text("text").rpartition(" ")
    yield Blank(where=row.where, before=before + " ", after=".", answer=word)


# ---- choosing ----------------------------------------------------------------------------------------------------


def own_choice(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    """The user's rows: a context, candidates, and the right one as a number, its letter or its text."""
    options, answer = row.texts("choices", least=2), row["answer"]
    if isinstance(answer, str) and answer in options:
        gold = options.index(answer)
    elif isinstance(answer, str) and len(answer) == 1 and answer in LETTERS:
        gold = TaskRow({"answer": LETTERS.index(answer)}, row.where).index("answer", len(options))
    else:
        gold = row.index("answer", len(options))
    yield choice(row, row.text("context"), options, gold, between=str(row.get("between", " ")))


def own_text(row: TaskRow, protocol: ScoringProtocol) -> Iterator[LastWord]:
    yield LastWord(where=row.where, context=row.text("context"), word=" " + row.words("target"))


def own_blank(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Blank]:
    before, found, after = row.text("text").partition("[MASK]")
    if not found:
        raise UserError(f"{row.where}: the text has no [MASK] to fill")
    yield Blank(where=row.where, before=before, after=after, answer=row.words("answer"))


def clean_hellaswag(text: str) -> str:
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def hellaswag(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    endings = [clean_hellaswag(ending) for ending in row.texts("endings", least=2)]
    context = f"{row.text('activity_label')}: {row.text('ctx_a')} {row.text('ctx_b').capitalize()}"
    yield choice(row, clean_hellaswag(context), endings, row.index("label", len(endings)))


def piqa(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    goal, options = row.text("goal"), [row.text("sol1"), row.text("sol2")]
    gold = row.index("label", 2)
    if protocol.name == "harness":
        yield choice(row, f"Question: {goal}\nAnswer:", options, gold)
    else:
        yield choice(row, goal, options, gold, between="\n")


def arc_fields(row: TaskRow) -> tuple[str, list[str], int]:
    """ARC and OpenBookQA, in the hub's form or the original one: question, candidates, the right one."""
    question: Any = row.get("question_stem", row.get("question"))
    choices: Any = row.get("choices")
    if isinstance(question, Mapping):  # the original files
        question, choices = question.get("stem"), question.get("choices")
    if isinstance(choices, Mapping):
        texts, labels = list(choices.get("text", ())), list(choices.get("label", ()))
    elif isinstance(choices, list):
        texts, labels = [c.get("text") for c in choices], [c.get("label") for c in choices]
    else:
        texts, labels = [], []
    if not isinstance(question, str) or not texts or len(texts) != len(labels):
        raise UserError(f"{row.where}: a question with choices (text and label) is expected; there are {list(row)}")
    return question, texts, TaskRow({"answerKey": row.text("answerKey").strip()}, row.where).one_of("answerKey", labels)


def arc(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    question, options, gold = arc_fields(row)
    neutral = "Answer:" if protocol.unconditional else None
    yield choice(row, f"Question: {question}\nAnswer:", options, gold, neutral=neutral)


def openbookqa(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    question, options, gold = arc_fields(row)
    neutral = "Answer:" if protocol.unconditional else None
    yield choice(row, question, options, gold, neutral=neutral)


def boolean_label(row: TaskRow, name: str) -> int:
    word = str(row[name]).strip().lower()
    if word not in ("0", "false", "no", "1", "true", "yes"):
        raise UserError(f"{row.where}: {name} is {row[name]!r}, which is neither yes nor no")
    return int(word in ("1", "true", "yes"))


def boolq(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    gold = boolean_label(row, "label" if "label" in row else "answer")
    passage, question = row.text("passage"), row.text("question")
    words = ("Question", "Answer") if protocol.name == "harness" else ("question", "answer")
    yield choice(row, f"{passage}\n{words[0]}: {question}?\n{words[1]}:", ["no", "yes"], gold)


def copa(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    word = ("because", "therefore")[row.one_of("question", ("cause", "effect"))]
    options = [row.text("choice1"), row.text("choice2")]
    options = [" " + option[:1].lower() + option[1:] for option in options]
    # the harness puts its own blank before one that is there already
    between = " " if protocol.name == "harness" else ""
    yield choice(row, f"{row.text('premise').strip()[:-1]} {word}", options, row.index("label", 2), between=between)


def winogrande(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    before, gap, after = row.text("sentence").partition("_")
    if not gap:
        raise UserError(f"{row.where}: the sentence has no _ to put the options in")
    options = [row.text("option1"), row.text("option2")]
    yield partial_scoring(row, before, options, " " + after.strip(), row.index("answer", 2, first=1))


def partial_scoring(row: TaskRow, before: str, options: list[str], after: str, gold: int) -> MultipleChoice:
    """Partial scoring: how likely the rest is after each candidate."""
    contexts = tuple(before + option for option in options)
    rest = (after,) * len(options)
    return MultipleChoice(where=row.where, contexts=contexts, continuations=rest, names=contexts, gold=gold)


def full_scoring(row: TaskRow, before: str, options: list[str], after: str, gold: int) -> MultipleChoice:
    """Full scoring: how likely the candidate and the rest are."""
    texts = tuple(before + option + after for option in options)
    return MultipleChoice(where=row.where, contexts=("",) * len(options), continuations=texts, names=texts, gold=gold)


OPENERS = ("A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their")


def winograd_parts(row: TaskRow) -> tuple[str, list[str], str, int]:
    text, pronoun = row.text("text").replace("  ", " "), row.text("pronoun")
    at = row.index("pronoun_loc", len(text))
    options = row.texts("options", least=2)
    if pronoun.lower() in ("my", "his", "her", "our", "their"):
        options = [option + "'s" for option in options]
    if text[at - 2] != ".":  # inside a sentence
        options = [
            option.replace(first, first.lower()) if (first := option.split()[0]) in OPENERS else option
            for option in options
        ]
    return text[:at], options, text[at + len(pronoun) :], row.index("label", len(options))


def winograd(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    before, options, after, gold = winograd_parts(row)
    # the harness puts its own blank before the one that is there
    after = " " + after if protocol.name == "harness" else after
    yield partial_scoring(row, before, options, after, gold)


def winograd_full(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    yield full_scoring(row, *winograd_parts(row))


def race(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    """Rows with one question, or with all questions of an article, of which the harness asks the last."""
    article = row.text("article")
    if "problems" in row:
        problems = [TaskRow(problem, row.where) for problem in ast.literal_eval(row.text("problems"))]
    else:
        problems = [TaskRow({k: row[k] for k in ("question", "options", "answer")}, row.where)]
    if protocol.name == "harness":
        *earlier, last = problems
        text = f"Article: {article}\n\n" + "".join(map(race_solved, earlier)) + last.text("question")
        options = last.texts("options", least=2)
        yield choice(last, text, options, last.one_of("answer", LETTERS[: len(options)]))
        return
    for n, problem in enumerate(problems):
        solved = "".join(f"Q: {p.text('question')}\n\nA: {race_answer(p)}\n\n" for p in problems[:n])
        text = f"Article:\n{article}\n\n{solved}Q: {problem.text('question')}\n\nA:"
        neutral = "A:" if protocol.unconditional else None
        options = problem.texts("options", least=2)
        yield choice(problem, text, options, problem.one_of("answer", LETTERS[: len(options)]), neutral=neutral)


def race_answer(problem: TaskRow) -> str:
    options = problem.texts("options")
    return options[problem.one_of("answer", LETTERS[: len(options)])]


def race_solved(problem: TaskRow) -> str:
    question, answer = problem.text("question"), race_answer(problem)
    if question.endswith("  _  ."):
        return f"{question[:-5]}{answer}\n"
    return f"Question: {question}\nAnswer: {answer}\n"


def story_cloze(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    hub = "input_sentence_1" in row
    names = [f"input_sentence_{n}" if hub else f"InputSentence{n}" for n in (1, 2, 3, 4)]
    ends = ("sentence_quiz1", "sentence_quiz2") if hub else ("RandomFifthSentenceQuiz1", "RandomFifthSentenceQuiz2")
    gold = row.index("answer_right_ending" if hub else "AnswerRightEnding", 2, first=1)
    yield choice(row, " ".join(map(row.text, names)), [row.text(name) for name in ends], gold)


def childrens_book(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    """Each candidate with the rest of its sentence, after the twenty sentences before."""
    options, answer = row.texts("options", least=2), row.text("answer")
    story = clean_book(" ".join(row.texts("sentences")))
    before, gap, after = row.text("question").partition("XXXXX")
    if not gap or answer not in options:
        what = "the question has no XXXXX" if not gap else f"the answer {answer!r} is not among the options"
        raise UserError(f"{row.where}: {what}")
    context = f"{story} {clean_book(before)}".rstrip()
    yield choice(row, context, [clean_book(option + after) for option in options], options.index(answer))


def minimal_pair(row: TaskRow, protocol: ScoringProtocol, *, between: str = "") -> Iterator[MultipleChoice]:
    """BLiMP and data sets like it: the acceptable sentence should be the likelier one."""
    pair = (row.text("sentence_good"), row.text("sentence_bad"))
    yield MultipleChoice(
        where=row.where,
        contexts=("", ""),
        continuations=tuple(between + sentence for sentence in pair),
        names=pair,
        gold=0,
        ties=True,
        group=str(row.get("linguistics_term", row.get("phenomenon", row.get("UID", "")))),
    )


# ---- GLUE, as a prompt and by GPT-1's heuristics -----------------------------------------------------------------


def sst2(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    text = f"{row.text('sentence')}\nQuestion: Is this sentence positive or negative?\nAnswer:"
    yield choice(row, text, ["negative", "positive"], row.index("label", 2))


def sst2_gpt1(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    yield choice(row, f"{row.text('sentence').strip()} very", ["negative", "positive"], row.index("label", 2))


def entails(row: TaskRow) -> int:
    """0 for entailment, 1 for none, as a number or in words."""
    if str(row["label"]) in ("0", "1"):
        return int(row["label"])
    return row.one_of("label", ("entailment", "not_entailment"))


def rte(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    words = ("Question", "Answer") if protocol.name == "harness" else ("question", "answer")
    text = f"{row.text('sentence1')}\n{words[0]}: {row.text('sentence2')} True or False?\n{words[1]}:"
    yield choice(row, text, ["True", "False"], entails(row))


def rte_gpt1(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Judgement]:
    premise, hypothesis = row.text("sentence1"), " " + row.text("sentence2")
    yield Judgement(where=row.where, context=premise, statement=hypothesis, good=entails(row) == 0)


def cola(row: TaskRow, protocol: ScoringProtocol) -> Iterator[MultipleChoice]:
    text = f"{row.text('sentence')}\nQuestion: Does this sentence make sense?\nAnswer:"
    yield choice(row, text, ["no", "yes"], row.index("label", 2))


def cola_gpt1(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Judgement]:
    good = row.index("label", 2) == 1
    yield Judgement(where=row.where, context="", statement=row.text("sentence"), good=good)


# ---- generation ---------------------------------------------------------------------------------------------------


def short_answer(row: TaskRow, protocol: ScoringProtocol, prompt: str, answers: tuple[str, ...]) -> Question:
    """A question whose answer is one line; GPT-3's are searched for, the others' written greedily."""
    if not answers:
        raise UserError(f"{row.where}: there is no answer to compare with")
    tokens = NEW_TOKENS if protocol.name == "harness" else 32
    beams = BEAMS if protocol.name == "gpt3-paper" else 1
    return Question(where=row.where, prompt=prompt, answers=answers, tokens=tokens, beams=beams)


def translation(row: TaskRow, protocol: ScoringProtocol, *, languages: tuple[str, str]) -> Iterator[Question]:
    if "translation" in row:  # the hub's form
        source, target = (TaskRow(row["translation"], row.where).text(language) for language in languages)
    else:
        source, target = row.text("source"), row.text("target")
    if protocol.name == "harness":
        first, second = (LANGUAGES[language] for language in languages)
        item = short_answer(row, protocol, f"{first} phrase: {source}\n{second} phrase:", (target,))
        yield replace(item, source=source, gap="  ")  # a blank of the task's and one of the harness's own
    else:
        yield replace(short_answer(row, protocol, f"{source} =", (target,)), source=source, tokens=100)


def summary(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Question]:
    """GPT-2's: 100 tokens of top-k 2 after TL;DR:, of which the first three sentences count."""
    article, answers = row.text("article"), (row.text("highlights"),)
    if protocol.name == "harness":
        prompt = f"Summarize the following article:\n\n{article}\n\nSummary:"
        yield Question(where=row.where, prompt=prompt, answers=answers, stop=("\n\n",), tokens=128)
    else:
        prompt = f"{article}\nTL;DR:"
        yield Question(where=row.where, prompt=prompt, answers=answers, stop=(), tokens=100, top_k=2, sentences=3)


def natural_question(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Question]:
    answers = row["answer"] if "answer" in row else row["answers"]
    item = open_question(row, protocol, (answers,) if isinstance(answers, str) else answers, ("Q", "A"))
    if protocol.name == "harness":
        item = replace(item, opening="Answer these questions:\n\n", same="but-articles")
    yield item


def trivia_question(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Question]:
    """Every alias counts; for the harness the name itself does only where it is among them."""
    harness, answer = protocol.name == "harness", row["answer"]
    if not isinstance(answer, Mapping):
        raise UserError(f"{row.where}: the answer should have a value and aliases, and is {answer!r}")
    aliases = [] if harness else [answer["value"]]
    item = open_question(row, protocol, [*aliases, *answer.get("aliases", ())], ("Question", "Answer"))
    yield replace(item, same="but-marks") if harness else item


def open_question(row: TaskRow, protocol: ScoringProtocol, answers: Sequence[str], words: tuple[str, str]) -> Question:
    """A question out of nothing; `words` are the harness's."""
    question, accepted = row.text("question"), tuple(dict.fromkeys(answers))
    if protocol.name == "harness":
        prompt = f"{words[0]}: {question}?\n{words[1]}:"
        return replace(short_answer(row, protocol, prompt, accepted), stop=("\n", ".", ","))
    question = question[:1].upper() + question[1:].removesuffix("?")
    between = "\n\n" if protocol.name == "gpt3-paper" else "\n"
    return short_answer(row, protocol, f"Q: {question}?{between}A:", accepted)


def squad(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Question]:
    answers = row["answers"]
    texts = tuple(dict.fromkeys(answers["text"] if isinstance(answers, Mapping) else [a["text"] for a in answers]))
    ask, answer = ("Question", "Answer") if protocol.name == "harness" else ("Q", "A")
    background = f"Title: {row.text('title')}\n\nBackground: {row.text('context')}"
    yield short_answer(row, protocol, f"{background}\n\n{ask}: {row.text('question')}\n\n{answer}:", texts)


def coqa(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Item]:
    """Every turn of a conversation, the true answers standing before it; the harness asks the last one alone."""
    talk, asked, answers = row.text("story") + "\n\n", turns(row["questions"]), turns(row["answers"])
    others = [turns(more) for more in (row.get("additional_answers") or {}).values()]
    if any(len(column) != len(asked) for column in (answers, *others)):
        raise UserError(f"{row.where}: {len(asked)} questions have {len(answers)} answers")
    for n, question in enumerate(asked):
        talk += f"Q: {question}\n\nA:"
        if protocol.name != "harness" or n == len(asked) - 1:
            accepted: dict[str, str] = {}
            for column in (answers, *others):
                accepted.setdefault(column[n].lower(), column[n])
            yield replace(short_answer(row, protocol, talk, tuple(accepted.values())), stop=("\nQ:",))
        talk += f" {answers[n]}\n\n"


def turns(column: Any) -> list[str]:
    """The text of each turn, in the hub's form or the original one."""
    return list(column["input_text"]) if isinstance(column, Mapping) else [turn["input_text"] for turn in column]


# ---- long texts: documents, detokenizers, counts -----------------------------------------------------------------

HEADING = re.compile(r"^ = [^=\n]*[^= \n][^=\n]* = ?$", re.MULTILINE)
SPACED = (" : ", " ; ", " . ", " ! ", " ? ", " , ")
BRACKETS = ((r"\(", r"\)"), (r"\[", r"\]"), ("{", "}"), ('"', '"'), ("'", "'"))


def clean_wikitext(text: str, *, mended: bool) -> str:
    """WikiText as it was written. Its usual code has one expression that never matches: mended, it does."""
    text = text.replace("s '", "s'")
    if mended:
        text = re.sub(r"' ([0-9])", r"'\1", text)
    for symbol in "-,.":
        text = text.replace(f" @{symbol}@ ", symbol)
    for mark in SPACED:
        text = text.replace(mark, mark[1:])
    for left, right in BRACKETS:
        inside = rf"{left}\s*([^{right}]*?)\s*{right}"
        text = re.sub(inside, lambda m: m[0][0] + m[1] + m[0][-1], text)
    for equals in ("= = = =", "= = =", "= ="):
        text = text.replace(equals, equals.replace(" ", ""))
    text = text.replace(" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}")
    return text.replace(" \n", "\n").replace("\n ", "\n").replace(" N ", " 1 ").replace(" 's", "'s")


def clean_penn(text: str, *, mended: bool) -> str:
    """Penn Treebank with its contractions and numbers closed up. Its usual code loses the blank before a number."""
    number = " 1 " if mended else "1 "
    for spaced, close in ((" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", number)):
        text = text.replace(spaced, close)
    return text.replace("$ 1", "$1").replace("# 1", "#1")


def clean_book(text: str) -> str:
    """Treebank quotes, brackets and punctuation as in print."""
    for old, new in (("-LRB-", "("), ("-RRB-", ")"), ("-LCB-", "{"), ("-RCB-", "}"), ("-LSB-", "["), ("-RSB-", "]")):
        text = text.replace(old, new)
    text = re.sub(r"``\s*", '"', text)
    text = re.sub(r"\s*''", '"', text)
    text = re.sub(r"`\s*", "'", text)
    text = re.sub(r"([(\[{])\s+", r"\1", text)
    text = re.sub(r"\s+([)\]},.;:!?])", r"\1", text)
    return re.sub(r"\s+('s|'re|'ve|'ll|'d|'m|n't)\b", r"\1", text)


def wikitext(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Passage]:
    pages = split_pages(row.text("text")) if protocol.documents else [row.text("text")]
    for page in pages:
        yield passage(row, clean_wikitext(page, mended=protocol.detokenizer == "mended"), page)


def split_pages(text: str) -> list[str]:
    """One text per article; the line before a heading belongs to it."""
    starts = [m.start() for m in HEADING.finditer(text)]
    starts = [start - 2 if text[max(0, start - 2) : start] == " \n" else start for start in starts]
    pages = [text[a:b] for a, b in pairwise(sorted({0, *starts, len(text)}))]
    return [page for page in pages if page.strip()]


def penn(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Passage]:
    text = row.text("text")
    yield passage(row, clean_penn(text, mended=protocol.detokenizer == "mended"), text)


def raw_text(row: TaskRow, protocol: ScoringProtocol) -> Iterator[Passage]:
    text = row.text("text")
    yield passage(row, text, text)


def passage(row: TaskRow, text: str, original: str) -> Passage:
    """What is divided by is always counted in the original."""
    words = len(re.split(r"\s+", original))
    return Passage(
        where=row.where, text=text, words=words, characters=len(original), bytes=len(original.encode("utf-8"))
    )
