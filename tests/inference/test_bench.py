"""The benchmark of decoding: every engine runs, everybody gets the same jobs, and the rows are plain arithmetic."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from benchmarks.peers import PEERS, installed
from plume import bench
from plume.bench import OWN, BenchEngine, Setting
from plume.config import DecodeBenchConfig, UserError

ENGINES = {name: ("plume", make) for name, make in OWN.items()} | PEERS
PROMPTS, LONG = [[5, 6, 7], [8, 9, 10]], list(range(3, 19))


def setting(folder, room) -> Setting:
    config = DecodeBenchConfig(model=folder, prompt_tokens=3, new_tokens=4, batch=2, prefill_tokens=16, threads=1)
    return Setting(folder, config, 1, room, PROMPTS, LONG)


@pytest.mark.filterwarnings("ignore")  # of the peers
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_writes_and_reads(name, trained_folder, tmp_path):
    package, make = ENGINES[name]
    pytest.importorskip(package, reason=f"{package} is a peer")
    engine = make(setting(trained_folder, tmp_path))
    for _ in range(2):  # again from the beginning
        engine.write(PROMPTS, 4)
        engine.read(LONG)
    assert engine.weights > 0


def test_peers_that_are_not_installed_are_left_out(capsys):
    assert list(installed(["transformers", "no_such_engine"])) == ["transformers float32"]
    assert capsys.readouterr().out == "no_such_engine is not installed and left out\n"


class Line:
    """One end of a pipe: what will be asked, and what was answered."""

    def __init__(self, *asked):
        self.asked, self.answered = list(asked), []

    def recv(self):
        return self.asked.pop(0)

    def send(self, answer):
        self.answered.append(answer)


def test_a_process_does_the_jobs_it_is_told(tmp_path):
    done = []
    engine = BenchEngine(lambda prompts, new: done.append((prompts, new)), lambda prompt: done.append(prompt), 77)
    line = Line("batch 1", "batch 2", "prefill", None)
    bench.serve_engine(lambda _: engine, setting(tmp_path, tmp_path), line)
    assert done == [(PROMPTS[:1], 4), (PROMPTS, 4), LONG]
    assert line.answered[0] == 77 and len(line.answered) == 4 and min(line.answered) > 0
    line = Line("batch 1")
    bench.serve_engine(lambda _: 1 / 0, setting(tmp_path, tmp_path), line)
    assert line.answered == ["ZeroDivisionError: division by zero"]


SPEEDS = {
    "plume float32": 100.0,
    "plume float24": 130.0,
    "plume int8": 400.0,
    "plume int4": 600.0,
    "transformers float32": 50.0,
}


class Made(bench.Contender):
    """Answers at once; slow in the first round, which does not count, and slower from round to round."""

    def __init__(self, name, make, setting):
        if name not in SPEEDS:
            raise RuntimeError("not here")
        self.name, self.rates, self.weights, self.asked = name, {}, 10, 0

    def measure(self, job, *, keep):
        self.asked += 1
        if keep:
            self.rates.setdefault(job, []).append(SPEEDS[self.name] - self.asked)

    def close(self):
        assert self.asked == 3 * 3  # jobs and rounds, the first one warming up


def test_rows_compare_the_best_rounds(monkeypatch, trained_folder, capsys):
    monkeypatch.setattr(bench, "Contender", Made)
    monkeypatch.setattr(bench, "read_bandwidth", lambda threads, size: 500.0 * size)
    config = DecodeBenchConfig(model=trained_folder, batch=2, rounds=2, prefill_tokens=16, threads=1)
    peers = {"transformers float32": None, "onnxruntime float32": None}
    report = bench.bench_decode(config, peers)
    assert "onnxruntime float32 is left out: not here" in capsys.readouterr().out
    ours, _, int8, int4, theirs = report.rows
    best = {name: speed - 4 for name, speed in SPEEDS.items()}  # the first job of the first round that counts
    assert [row["batch 1"] for row in report.rows] == list(best.values())
    assert theirs["batch 1: plume int8 is"] == best["plume int8"] / best["transformers float32"]
    assert int4["bandwidth"] == best["plume int4"] * 10 / 5000 and theirs["bandwidth"] is None
    assert ours["batch 1: plume int8 is"] == best["plume int8"] / best["plume float32"] and int8["bandwidth"] > 0
    stream = io.StringIO()
    Console(file=stream, width=140).print(bench.table(report, config))
    shown = stream.getvalue()
    assert "2.09 / 8.61" in shown and "46.0" in shown  # 96 and 396 against 46
    monkeypatch.delitem(SPEEDS, "plume int8")
    with pytest.raises(RuntimeError, match="not here"):  # a fault of our own is no peer's
        bench.bench_decode(config, peers)


def test_the_cost_of_a_long_context_is_measured_behind_one(random_model, trained_folder, tokenizer, tmp_path):
    from plume.hf import save_model

    folder = save_model(random_model(context=300, vocab_size=tokenizer.vocab_size), tmp_path / "m", tokenizer=tokenizer)
    growth = bench.context_growth(folder, DecodeBenchConfig(threads=1))
    assert growth.keys() == {64, 256} and min(growth.values()) > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_bandwidth_is_bytes_by_the_shortest_time(threads, monkeypatch):
    """Five readings by a clock of our own: of 9, 4, 2, 7 and 3 seconds."""
    times = iter([0.0, 9.0, 10.0, 14.0, 20.0, 22.0, 30.0, 37.0, 40.0, 43.0])
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert bench.read_bandwidth(threads, size=1 << 16) == (1 << 16) / 2


def test_a_random_folder_has_the_presets_shape(monkeypatch, tmp_path, random_model):
    import transformers

    shape = random_model(vocab_size=300).config
    monkeypatch.setattr(bench, "preset", lambda name: shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(bench.random_folder("gpt2", tmp_path))
    assert (model.config.vocab_size, model.config.n_embd, model.config.n_layer) == (300, shape.width, shape.layers)
    assert np.isfinite(model.get_input_embeddings().weight.detach().numpy()).all()


@pytest.mark.parametrize(("answer", "kind"), [("UserError: no head", UserError), ("OSError: no head", RuntimeError)])
def test_a_users_mistake_in_an_engines_process_stays_one(answer, kind):
    one = bench.Contender.__new__(bench.Contender)
    one._line = SimpleNamespace(recv=lambda: answer)
    with pytest.raises(kind, match="^no head$" if kind is UserError else "^OSError"):
        one._answer()


def test_lengths_are_cut_to_the_context():
    cut = bench.fitted(DecodeBenchConfig(prompt_tokens=32, new_tokens=500, prefill_tokens=512), 128)
    assert (cut.prompt_tokens, cut.new_tokens, cut.prefill_tokens) == (32, 96, 128)
    assert bench.fitted(DecodeBenchConfig(), 1024) == DecodeBenchConfig()
