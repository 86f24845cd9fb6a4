"""Labelled files of every kind are read, columns are guessed and shown, and mistakes are named with their place."""

import csv
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plume.config import TaskConfig, UserError
from plume.tasks.schema import Example
from plume.tasks.task_data import load_task, split
from plume.tasks.token_rows import Template, parse, shares, with_task_tokens


def rows(path, header, *lines):
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return str(path)


def labelled(tmp_path, name="a.csv", count=20):
    return rows(
        tmp_path / name, "review,sentiment", *[f"text number {n},{'good' if n % 2 else 'bad'}" for n in range(count)]
    )


def test_validation_rows_without_labels_are_no_reason_to_split(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n" + "a film,good\na bore,bad\n" * 10)
    (tmp_path / "dev.csv").write_text("text,label\na film,\na bore,\n")
    with pytest.raises(UserError, match=r"dev\.csv holds no usable row \(2 rows: no label\)"):
        load_task(TaskConfig(train=str(tmp_path / "train.csv"), validation=str(tmp_path / "dev.csv")))


def test_paths_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.csv", "b.csv", "c.csv"):
        labelled(tmp_path, name)
    data = load_task(TaskConfig(train="~/a.csv", validation="~/b.csv", test="~/c.csv"))
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 20, 20)
    (tmp_path / "task").mkdir()
    labelled(tmp_path / "task", "train.csv")
    assert load_task(TaskConfig(train="~/task")).labels == ("bad", "good")


def test_a_csv_with_columns_of_other_names(tmp_path):
    data = load_task(TaskConfig(train=labelled(tmp_path)))
    assert (data.kind, data.target, data.labels) == ("classify", "label", ("bad", "good"))
    assert data.columns == {"text": "review", "label": "sentiment"}
    assert set(data.guessed) == {"text", "label"}
    assert len(data.train) + len(data.validation) == 20
    assert {e.label for e in data.validation} == {"bad", "good"}


def test_columns_that_only_their_content_tells(tmp_path):
    path = rows(tmp_path / "a.csv", "x,y", *[f"{n % 2},some words here {n}" for n in range(20)])
    assert load_task(TaskConfig(train=path)).columns == {"text": "y", "label": "x"}


def test_a_constant_column_is_never_guessed_as_the_label(tmp_path):
    """CoLA's files: source, label, a star or nothing, sentence, and no header."""
    lines = [f"gj04\t{n % 2}\t{'*' if n % 2 else ''}\tsentence number {n} of some" for n in range(50)]
    (tmp_path / "a.tsv").write_text("\n".join(["origin\tacceptable\tstar\tsaid", *lines]))
    assert load_task(TaskConfig(train=str(tmp_path / "a.tsv"))).columns == {"text": "said", "label": "acceptable"}
    (tmp_path / "b.tsv").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"--task\.header column1 label column3 text"):
        load_task(TaskConfig(train=str(tmp_path / "b.tsv")))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gb18030"])
@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_a_csv_from_any_spreadsheet(tmp_path, encoding, mark):
    """Semicolons, a byte order mark, Windows line ends, quoted newlines and marks, names with spaces and capitals."""
    table = [["Nr.", "Kunden Meinung (Text)", "Urteil ★"]]
    table += [[str(n), f'这本书\n第{n}页, "sehr; gut|schön"', "好评" if n % 2 else "差评"] for n in range(20)]
    with (tmp_path / "a.csv").open("w", encoding=encoding, newline="") as stream:
        csv.writer(stream, delimiter=mark, lineterminator="\r\n").writerows(table)
    said = "gb18030" if encoding == "gb18030" else "utf-8"  # a byte order mark speaks for itself
    data = load_task(TaskConfig(train=str(tmp_path / "a.csv"), encoding=said))
    assert data.columns == {"text": "Kunden Meinung (Text)", "label": "Urteil ★"}
    assert data.labels == ("好评", "差评")
    assert {e.fields["text"] for e in (*data.train, *data.validation)} == {row[1] for row in table[1:]}


def test_usual_names_in_capitals(tmp_path):
    path = rows(
        tmp_path / "a.csv", "ID,Sentence1, Sentence2 ,LABEL", *[f"{n},left {n},right {n},{n % 2}" for n in range(20)]
    )
    data = load_task(TaskConfig(train=path))
    assert data.kind == "pair"
    assert data.columns == {"text": "Sentence1", "pair": " Sentence2 ", "label": "LABEL"}


def test_what_is_wrong_with_a_csv_is_said_with_its_remedy(tmp_path):
    lines = [f"schöner Film {n},{'gut' if n % 2 else 'übel'}" for n in range(20)]
    (tmp_path / "latin.csv").write_text("\n".join(["text,label", *lines]), encoding="latin-1")
    with pytest.raises(UserError, match=r"line 2: not utf-8 text; encoding=cp1252 \(Windows\), gb18030"):
        load_task(TaskConfig(train=str(tmp_path / "latin.csv")))  # latin-1 would read its quotation marks as controls
    assert load_task(TaskConfig(train=str(tmp_path / "latin.csv"), encoding="latin-1")).labels == ("gut", "übel")
    with pytest.raises(UserError, match="encoding='utf-9' is not known"):
        TaskConfig(train="any.csv", encoding="utf-9")
    with pytest.raises(UserError, match=r"'übel' is a label in later rows too.*--task.header text label"):
        load_task(TaskConfig(train=rows(tmp_path / "bare.csv", *lines)))
    assert len(load_task(TaskConfig(train=str(tmp_path / "bare.csv"), header=("text", "label"))).train) == 18
    with pytest.raises(UserError, match=r"another column than 'b': --task.columns.label NAME"):
        load_task(TaskConfig(train=rows(tmp_path / "one.csv", "a,b", *[f"some text {n},2" for n in range(20)])))
    with pytest.raises(UserError, match="no column found for the label of a classify task; it has 'text'; add one"):
        load_task(TaskConfig(train=rows(tmp_path / "texts.csv", "text", *[f"some text {n}" for n in range(20)])))
    with pytest.raises(UserError, match="no column found for the label of a classify task; it has 'text', 'Nr'"):
        load_task(TaskConfig(train=rows(tmp_path / "none.csv", "text,Nr", *[f"some text {n},{n}" for n in range(20)])))
    with pytest.raises(UserError, match="20 rows with 2 different texts: too few to hold some out"):
        load_task(TaskConfig(train=rows(tmp_path / "few.csv", "text,label", *["good,yes", "bad,no"] * 10)))


def test_parquet_and_jsonl_and_tsv_say_the_same(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = [{"sentence1": f"left {n}", "sentence2": f"right {n}", "label": n % 3} for n in range(30)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in table))
    rows(tmp_path / "a.tsv", "sentence1\tsentence2\tlabel", *["\t".join(map(str, r.values())) for r in table])
    read = [load_task(TaskConfig(train=str(tmp_path / f"a.{kind}"))) for kind in ("parquet", "jsonl", "tsv")]
    for data in read:
        assert data.kind == "pair" and data.labels == ("0", "1", "2")
        assert [e.fields for e in data.train] == [e.fields for e in read[0].train]


@pytest.mark.parametrize("names", [("document", "summary"), ("article", "highlights"), ("source", "target")])
def test_a_text_and_its_summary_are_a_task_of_generation(tmp_path, names):
    rows = [f"a long report on the ships of year {n},ships of {n}" for n in range(30)]
    (tmp_path / "a.csv").write_text("\n".join([",".join(names), *rows]) + "\n")
    data = load_task(TaskConfig(train=str(tmp_path / "a.csv")))
    assert data.kind == "generate"
    found = [(e.fields["source"], e.label) for e in (*data.train, *data.validation)]
    assert sorted(found) == sorted(tuple(row.split(",")) for row in rows)


def test_numbers_are_told_from_labels(tmp_path):
    path = rows(tmp_path / "a.csv", "text,score", *[f"text {n},{n / 4}" for n in range(20)])
    data = load_task(TaskConfig(train=path))
    assert data.target == "number" and data.labels == ("score",)
    assert sorted(e.label for e in (*data.train, *data.validation)) == [n / 4 for n in range(20)]


def test_conll_columns(tmp_path):
    sentences = [
        "-DOCSTART- -X- O O",
        "EU NNP B-NP B-ORG\nrejects VBZ B-VP O",
        "Peter N B-NP B-PER\nBlack N I-NP I-PER",
    ]
    text = "\n\n".join(sentences) + "\n\n"
    (tmp_path / "a.conll").write_text(text * 4)
    data = load_task(TaskConfig(train=str(tmp_path / "a.conll"), validation=str(tmp_path / "a.conll")))
    assert data.kind == "tag" and data.labels == ("B-ORG", "B-PER", "I-PER", "O")
    assert data.train[1].fields["words"] == ["Peter", "Black"] and data.train[1].label == ["B-PER", "I-PER"]


def test_conll_files_with_a_byte_order_mark_or_in_another_encoding(tmp_path):
    path = tmp_path / "a.conllu"
    word = "1\tZoë\tZoë\tPROPN\t_\t_\t0\troot\t_\t_\n2\tsings\tsing\tVERB\t_\t_\t1\tx\t_\t_\n\n"
    path.write_text("# sent_id = 1\n" + word * 3, encoding="utf-8-sig", newline="\r\n")
    data = load_task(TaskConfig(train=str(path), validation=str(path)))
    assert data.train[0].fields["words"] == ["Zoë", "sings"] and data.train[0].label == ["PROPN", "VERB"]
    path.write_text(word * 3, encoding="latin-1")
    with pytest.raises(UserError, match=r"a\.conllu line 1: not utf-8 text; encoding=cp1252"):
        load_task(TaskConfig(train=str(path)))
    for encoding in ("latin-1", "utf-16"):
        path.write_text(word * 3, encoding=encoding)
        data = load_task(TaskConfig(train=str(path), validation=str(path), encoding=encoding))
        assert data.train[0].fields["words"] == ["Zoë", "sings"] and data.train[0].label == ["PROPN", "VERB"]
        assert [e.where[-6:] for e in data.train] == ["line 1", "line 4", "line 7"]


def test_tags_that_are_no_list_are_named_with_their_line(tmp_path):
    rows = [{"words": ["a", "b"], "tags": ["X", "Y"]}, {"words": ["a", "b"], "tags": 5}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=r"line 2: tags is 5; it should hold a tag for each word.*skip_bad_rows"):
        load_task(TaskConfig(train=str(tmp_path / "a.jsonl")))


def test_squad_with_and_without_answers(tmp_path):
    qas = [
        {"id": "1", "question": "who?", "answers": [{"answer_start": 0, "text": "Mary"}]},
        {"id": "2", "question": "why?", "answers": [], "is_impossible": True},
    ]
    whole = {"version": "2.0", "data": [{"title": "t", "paragraphs": [{"context": "Mary sings.", "qas": qas}]}]}
    (tmp_path / "a.json").write_text(json.dumps(whole))
    data = load_task(TaskConfig(train=str(tmp_path / "a.json"), validation=str(tmp_path / "a.json")))
    assert data.kind == "span"
    assert [e.label for e in data.train] == [[(0, "Mary")], []]
    del qas[0]["answers"]
    (tmp_path / "test.json").write_text(json.dumps(whole))
    files = {name: str(tmp_path / f"{name}.json") for name in ("a", "test")}
    data = load_task(TaskConfig(train=files["a"], validation=files["a"], test=files["test"]))
    assert [e.label for e in data.test] == [None, []]


def test_an_empty_answer_is_none(tmp_path):
    """Then a threshold decides when no answer is given."""
    rows = [{"context": "Mary sings.", "question": "who?", "answers": answers} for answers in (["Mary"], [""])]
    rows.append({**rows[0], "answers": {"text": [" "], "answer_start": [0]}})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = load_task(TaskConfig(train=str(tmp_path / "a.jsonl"), validation=str(tmp_path / "a.jsonl")))
    assert [e.label for e in data.train] == [[(0, "Mary")], [], []]


def test_choices_in_columns_or_in_a_list(tmp_path):
    one = rows(tmp_path / "a.csv", "context,ending0,ending1,label", *["It rained,so we left,so we swam,1"] * 4)
    two = {"context": "It rained", "choices": ["so we left", "so we swam"], "label": "B"}
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(two)] * 4))
    for path in (one, str(tmp_path / "a.jsonl")):
        data = load_task(TaskConfig(train=path, validation=path))
        assert data.kind == "choose"
        assert data.train[0].fields["choices"] == ["so we left", "so we swam"] and data.train[0].label == 1


def test_ten_choices_in_columns_keep_their_order(tmp_path):
    names = [f"choice_{n}" for n in range(1, 12)]
    lines = [",".join(["It rained", *(f"text {n}" for n in range(1, 12)), label]) for label in ("1", "10")]
    path = rows(tmp_path / "a.csv", ",".join(["context", *names, "label"]), *lines)
    found = load_task(TaskConfig(train=path, validation=path)).train
    assert found[0].fields["choices"] == [f"text {n}" for n in range(1, 12)]
    assert [e.fields["choices"][e.label] for e in found] == ["text 2", "text 11"]


@pytest.mark.parametrize("label", ["3", 1.5])
def test_a_label_that_is_no_one_choice(tmp_path, label):
    row = {"context": "c", "choices": [str(n) for n in (*range(4, 16), 3)], "label": label}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"text of choice 12 and the index of another|neither an index, a letter nor"):
        load_task(TaskConfig(train=str(tmp_path / "a.jsonl")))


def test_aligned_files(tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\n", encoding="utf-8-sig")
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    both = {"train": str(tmp_path / "a.en"), "targets": str(tmp_path / "a.de")}
    data = load_task(TaskConfig(**both, validation=both["train"], validation_targets=both["targets"]))
    assert data.kind == "generate" and data.train[1].label == "zwei" and data.train[0].fields["source"] == "one"


def test_aligned_files_in_another_encoding_or_packed(tmp_path):
    import gzip

    source, target = tmp_path / "a.zh.gz", tmp_path / "a.de"
    source.write_bytes(gzip.compress("一\u2028二\n三\n".encode("gb18030")))
    target.write_text("für\rdich\nzwei\n", encoding="gb18030", newline="")
    data = load_task(
        TaskConfig(
            train=str(source),
            targets=str(target),
            validation=str(source),
            validation_targets=str(target),
            encoding="gb18030",
        )
    )
    assert [(e.fields["source"], e.label) for e in data.train] == [("一\u2028二", "für\rdich"), ("三", "zwei")]


@pytest.mark.parametrize(
    ("name", "kind", "target", "sizes", "labels"),
    [
        ("sst2", "classify", "label", (67349, 872), ("0", "1")),
        ("cola", "classify", "label", (8551, 1043), ("0", "1")),
        ("rte", "pair", "label", (2490, 277), ("entailment", "not_entailment")),
        ("stsb", "similarity", "number", (5749, 1500), ("score",)),
    ],
)
def test_glue_by_name(shared, name, kind, target, sizes, labels):
    data = load_task(TaskConfig(train=str(shared / "data" / name), name=name))
    assert (data.kind, data.target, data.labels) == (kind, target, labels)
    assert (len(data.train), len(data.validation)) == sizes


def test_the_real_squad(shared):
    data = load_task(TaskConfig(train=str(shared / "data" / "squad" / "dev-v1.1.json")))
    assert data.kind == "span" and len(data.train) + len(data.validation) == 10570


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        (["fine,good", ",bad"], {}, r"line 3: the text in 'text' is empty.*skip_bad_rows"),
        (["fine,", "dull,"], {}, r"holds no usable row \(2 rows: no label\)"),
        (["fine,good", "dull,good"], {}, "a classifier needs at least two labels"),
        (["fine,1.5", "dull,nan"], {"target": "number"}, "line 3: the target 'nan' is not a number"),
        (["fine,1.5", "dull,great"], {"target": "number"}, "the target 'great' is not a number"),
        (["fine,good", "dull,bad"], {"columns": {"text": "body"}}, "no column for columns.text='body'; it has 'text'"),
        (["fine,good", "dull,bad"], {"columns": {"words": "text", "tex": "text"}}, "there is no columns.tex"),
        (
            ["fine,good", "dull,bad"],
            {"kind": "pair"},
            "no column found for pair of a pair task; it has 'text', 'label'",
        ),
        (["fine,good", "dull,bad"], {"labels": ("good", "bad", "odd")}, "'odd', which no training row has"),
        (["fine,good", "dull,bad"], {"name": "sst3"}, "did you mean 'sst2'"),
        ([], {}, "holds no rows"),
    ],
)
def test_mistakes_are_named(tmp_path, lines, settings, message):
    path = rows(tmp_path / "a.csv", "text,label", *lines)
    with pytest.raises(UserError, match=message):
        load_task(TaskConfig(train=path, **settings))


def test_a_place_outside_the_choices_of_a_validation_row(tmp_path):
    def write(name, labels):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"context": "x", "choices": ["a", "b"], "label": n}) + "\n" for n in labels))
        return str(path)

    train = write("train.jsonl", [0, 1, 0, 1])
    with pytest.raises(UserError, match=r"later.jsonl line 2: .*the label 2"):
        load_task(TaskConfig(kind="choose", train=train, validation=write("later.jsonl", [0, 2])))


def test_answers_of_a_span_in_every_form(tmp_path):
    context = "Ann lives in Paris."
    for answers in ("Paris", ["Paris"], [{"answer_start": 13, "text": "Paris"}], [[13, "Paris"]]):
        path = tmp_path / "a.jsonl"
        rows = [{"context": context, "question": f"Where, {n}?", "answers": answers} for n in range(4)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert load_task(TaskConfig(kind="span", train=str(path))).train[0].label == [(13, "Paris")]
    path.write_text(json.dumps({"context": context, "question": "Where?", "answers": [5]}) + "\n")
    with pytest.raises(UserError, match="line 1: the answer 5 is neither a text nor a start"):
        load_task(TaskConfig(kind="span", train=str(path)))
    path.write_text(json.dumps({"context": context, "question": "Where?", "answers": "Rome"}) + "\n")
    with pytest.raises(UserError, match="line 1: the answer 'Rome' is not in its context; correct it"):
        load_task(TaskConfig(kind="span", train=str(path)))


def test_half_of_a_character_is_refused_with_its_line(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": "fine \ud83d" if n == 2 else f"text {n}", "label": str(n % 2)} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"line 3: the text in 'text' has half of a character"):
        load_task(TaskConfig(train=str(path)))


def test_packed_files_are_read_as_plain_ones(tmp_path):
    import gzip

    conll = tmp_path / "a.conll.gz"
    conll.write_bytes(gzip.compress(b"Ann B-PER\nsings O\n\nBob B-PER\n\nCid B-PER\nsits O\n"))
    assert load_task(TaskConfig(train=str(conll))).kind == "tag"
    answers = [{"answer_start": 0, "text": "Ann"}]
    questions = [{"id": str(n), "question": f"Who? {n}", "answers": answers} for n in range(4)]
    squad = {"data": [{"paragraphs": [{"context": "Ann", "qas": questions}]}]}
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps(squad).encode()))
    assert load_task(TaskConfig(train=str(path))).kind == "span"


def test_a_table_that_was_written_by_columns_is_no_text(tmp_path):
    """As pandas writes JSON unless it is told otherwise; the message said that the text was empty."""
    table = {"text": {"0": "fine", "1": "dull"}, "label": {"0": "good", "1": "bad"}}
    (tmp_path / "a.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match=r"'text' holds \{'0': 'fine', '1': 'dull'\}, which is no text"):
        load_task(TaskConfig(train=str(tmp_path / "a.json")))


def test_instructions_without_an_input(tmp_path):
    """NaN became the word nan at the end of the prompt; no instruction at all was learned from."""
    rows = [
        {"instruction": "Sum up.", "input": value, "output": "a sum"} for value in (float("nan"), None, "", "1 + 1")
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_task(TaskConfig(train=str(tmp_path / "a.jsonl"), validation=str(tmp_path / "a.jsonl")))
    sources = [e.fields["source"] for e in data.train]
    assert sources == ["user: Sum up.\n\nassistant:"] * 3 + ["user: Sum up.\n\n1 + 1\n\nassistant:"]
    (tmp_path / "b.jsonl").write_text('{"instruction": " ", "output": "a sum"}\n')
    with pytest.raises(UserError, match=r"b\.jsonl line 1: the instruction is empty; correct it, or skip"):
        load_task(TaskConfig(train=str(tmp_path / "b.jsonl")))


def test_labels_of_nan_or_white_space_are_missing(tmp_path):
    """NaN became the label 'nan', a space the label ''."""
    labels = ["good", "bad", float("nan"), " ", None, "good", "bad"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n}", "label": y}) + "\n" for n, y in enumerate(labels)))
    data = load_task(TaskConfig(train=str(path), validation=str(path)))
    assert data.labels == ("bad", "good") and len(data.train) == 4 and data.skipped.counts["no label"] == 6
    path.write_text('{"text": NaN, "label": "good"}\n')
    with pytest.raises(UserError, match="line 1: the text in 'text' is empty"):
        load_task(TaskConfig(train=str(path)))


def test_a_label_never_seen_in_training(tmp_path):
    train = rows(tmp_path / "a.csv", "text,label", *["fine,good", "dull,bad"] * 3)
    other = rows(tmp_path / "b.csv", "text,label", "fine,good", "so so,middling")
    with pytest.raises(UserError, match=r"b\.csv line 3: the label 'middling' is in no training row; known: bad, good"):
        load_task(TaskConfig(train=train, validation=other))


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path):
    path = rows(tmp_path / "a.csv", "text,label", *[f"fine {n},good\ndull {n},bad" for n in range(5)], ",bad", "lost,")
    data = load_task(TaskConfig(train=path, skip_bad_rows=True))
    assert len(data.train) + len(data.validation) == 10
    assert sum(data.skipped.counts.values()) == 2


def test_unequal_aligned_files(tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\n")
    with pytest.raises(UserError, match="same number of lines"):
        load_task(TaskConfig(train=str(tmp_path / "a.en"), targets=str(tmp_path / "a.de")))


@given(st.lists(st.sampled_from("abcdefghij"), min_size=12, max_size=60))
def test_the_split_is_fixed_and_copies_stay_together(letters):
    examples = [Example({"text": letter}, "yes" if letter < "e" else "no", "") for letter in letters]
    if len(set(letters)) < 4 or len({e.label for e in examples}) < 2:
        return
    train, validation = split(examples, 0.3, seed=1)
    assert len(train) + len(validation) == len(examples)
    assert not {e.fields["text"] for e in train} & {e.fields["text"] for e in validation}
    assert split(list(reversed(examples)), 0.3, seed=1)[1] == list(reversed(validation))


# ---- transformations ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 60))
def test_the_longest_text_is_cut_first(lengths, limit):
    """One token after the other is taken from the longest, as one would do by hand."""
    kept = list(lengths)
    while sum(kept) > limit:
        kept[max(range(len(kept)), key=lambda i: (kept[i], i))] -= 1
    found = shares(lengths, limit)
    assert sorted(found) == sorted(kept) and sum(found) == min(limit, sum(lengths))
    assert all(f <= length for f, length in zip(found, lengths, strict=True))


def test_a_long_example_keeps_its_marks_and_is_counted():
    from tiny import tokenizer_of

    tokenizer = with_task_tokens(tokenizer_of("gpt2"))
    transform = Template(tokenizer, ("{text} | {pair}",), length=16)
    (row,) = transform.rows([Example({"text": "what a bore " * 20, "pair": "fun"}, None, "")])[0]
    s = tokenizer.special_ids
    assert len(row.tokens) == 16 and row.tokens[0] == s["_start_"] and row.tokens[-1] == s["_classify_"]
    assert tokenizer.encode("fun") == row.tokens.tolist()[-1 - len(tokenizer.encode("fun")) : -1]
    assert transform.truncation.rows == 1 and transform.truncation.longest > 16


def test_a_template_is_data():
    from tiny import tokenizer_of

    tokenizer = with_task_tokens(tokenizer_of("gpt2"))
    transform = Template(tokenizer, ("say: {text} | {pair}",), length=32)
    (row,) = transform.rows([Example({"text": "yes", "pair": "no"}, None, "")])[0]
    s = tokenizer.special_ids
    said = [*tokenizer.encode("say:"), *tokenizer.encode(" yes")]
    assert row.tokens.tolist() == [s["_start_"], *said, s["_delimiter_"], *tokenizer.encode("no"), s["_classify_"]]


@pytest.mark.parametrize("template", ["", "a | b | c", "{text", "{two words}", "{text} |"])
def test_broken_templates(template):
    with pytest.raises(UserError, match="template"):
        parse(template)


def test_a_template_with_an_unknown_field():
    from tiny import tokenizer_of

    transform = Template(with_task_tokens(tokenizer_of("gpt2")), ("{txt}",), length=32)
    with pytest.raises(UserError, match="did you mean 'text'"):
        transform.rows([Example({"text": "yes"}, None, "")])
