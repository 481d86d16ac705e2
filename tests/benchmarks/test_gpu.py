"""`benchmarks.gpu` with stand-ins for its parts: order, rows of failures, going on, the page."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import exactness, wide_model
from benchmarks.gpu.parts import Part, first_table, further
from benchmarks.gpu.record import PLAN, Record, figures
from benchmarks.train.workloads import make_groups
from trainer.batch import build_batch
from trainer.cluster.device_plan import Gpu, plan_devices
from trainer.policy.checkpoint_type import checkpoint_type
from trainer.policy.scorer import use_packed_rows
from trainer.policy.shrink import VOCABULARY, shrunk
from trainer.settings.sources import load

STEPS = [
    {"step": 0, "time": 5.0, "eval/success": 0.5},
    {"step": 1, "time": 13.0, "time/step_s": 4.0, "reward/mean": 0.25},
    {
        "step": 2,
        "time": 15.0,
        "time/step_s": 2.0,
        "reward/mean": 0.5,
        "mismatch/logp_abs_mean": 1e-6,
        "sync/paused_s": 0.25,
        "memory/peak_gib": 37.8,
    },
]


def program(name: str, code: str, limit_s: float = 60.0) -> Part:
    """A part whose training run is this code; `folder` is where it writes, and it is noted."""
    begin = f"""
        import sys
        from pathlib import Path
        folder = Path(sys.argv[1].partition("=")[2])
        with open(folder.parent.parent / "order.txt", "a") as order:
            order.write("{name} ")
    """
    text = textwrap.dedent(begin) + textwrap.dedent(code)
    return Part(name, 1, program=(sys.executable, "-c", text), limit_s=limit_s)


RECORDED = f"""
    folder.mkdir()
    import json
    (folder / "metrics.jsonl").write_text("".join(json.dumps(s) + "\\n" for s in {STEPS!r}))
    print("GPU 0 (NVIDIA H200, 139.8 GiB): rank 0, 41.6 GiB (weights 22.5 GiB) + engine 0, 60%")
"""


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, handler: None) -> Run:
    return Run(monkeypatch, tmp_path)


class Run:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.monkeypatch, self.out = monkeypatch, out
        self.how = ["--rehearse"]

    def __call__(self, parts: Sequence[Part], *words: str) -> int:
        self.monkeypatch.setattr(bench, "first_table", lambda: list(parts))
        self.monkeypatch.setattr(bench, "further", lambda _: [])
        return bench.main([*self.how, "--out", str(self.out), *words])

    def on_a_gpu(self) -> None:
        self.monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        self.monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
        self.how = []

    @property
    def rows(self) -> dict[str, dict[str, object]]:
        parts: dict[str, dict[str, object]] = json.loads((self.out / "results.json").read_text())[
            "parts"
        ]
        return parts

    @property
    def order(self) -> list[str]:
        return (self.out / "order.txt").read_text().split()


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)


@pytest.mark.usefixtures("sixteen_cores")
def test_first_table_has_the_parts_in_their_order_and_lasts_eight_minutes() -> None:
    names = [part.name for part in first_table()]
    assert names == [
        "quickstart",
        "sleep",
        "weight updates",
        "adapter",
        "exactness",
        "training beside TRL",
    ]
    rounds = list(bench._beside(first_table(), alone=False))
    assert sum(max(part.limit_s for part in beside) for beside in rounds) <= 8 * 60
    assert {part.gpus for part in first_table()} == {1}
    every = [*names, *(part.name for part in further(8))]
    assert len(set(every)) == len(every)


def test_quickstart_on_a_gpu_is_the_quickstart_as_it_is() -> None:
    (part,) = [each for each in first_table() if each.name == "quickstart"]
    assert [*part.program, *part.words("F", rehearse=False)] == [
        ".venv/bin/agentic-train",
        "--config",
        "agentic_trainer.yaml",
        "trainer.run_dir=F/run",
    ]


def test_a_part_that_fails_is_a_row_that_says_why_and_the_others_go_on(run: Run) -> None:
    parts = [
        program("memory", "raise SystemExit('torch.OutOfMemoryError: CUDA out of memory. Tried')"),
        program("killed", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        program("wrong", "raise ValueError('a | b')"),
        program("hangs", "import signal\nsignal.pause()", limit_s=0.5),
        program("good", RECORDED),
    ]
    run.on_a_gpu()
    assert run(parts) == 1
    assert [name for name in run.order if name != "hangs"] == ["memory", "killed", "wrong", "good"]
    assert {name: row["result"] for name, row in run.rows.items()} == {
        "memory": "failed: out of memory: torch.OutOfMemoryError: CUDA out of memory. Tried",
        "killed": "failed: ended by SIGKILL, as if the machine's memory ran out",
        "wrong": "failed: exit status 1: ValueError: a / b",
        "hangs": "failed: more than 0.5 s",
        "good": "done",
    }


def test_started_again_it_runs_what_is_not_done_and_only_names_any(run: Run) -> None:
    good, bad = program("good", RECORDED), program("bad", "raise SystemExit(3)")
    assert run([good, bad]) == 1
    assert run([good, program("bad", RECORDED), program("later", RECORDED)]) == 0
    assert run.order == ["good", "bad", "bad", "later"]
    assert run([good, bad], "--only", "good") == 0
    assert run.order[4:] == ["good"]
    first = program("first", RECORDED)
    assert run([first, good]) == 0
    assert list(run.rows) == ["first", "good", "bad", "later"]
    with pytest.raises(SystemExit, match="no part 'x'; there are: good, bad"):
        run([good, bad], "--only", "x")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_while_parts_run_beside_each_other_it_leaves_none_of_them(
    tmp_path: Path, how: int
) -> None:
    says = "import os, signal, sys; open(sys.argv[2], 'w').write(str(os.getpid())); signal.pause()"
    pipes = [tmp_path / name for name in ("a", "b")]
    for pipe in pipes:
        os.mkfifo(pipe)
    code = f"""
        import os, sys
        from benchmarks.gpu import __main__ as bench
        from benchmarks.gpu.parts import Part
        os.cpu_count = lambda: 16
        bench._machine = lambda: "no GPU"
        bench.torch.cuda.device_count = lambda: 1
        program = (sys.executable, "-c", {says!r})
        bench.first_table = lambda: [
            Part(os.path.basename(pipe) + " part", 1, (pipe,), program=program, beside="both")
            for pipe in {[str(pipe) for pipe in pipes]!r}
        ]
        sys.exit(bench.main(["--out", {str(tmp_path / "out")!r}]))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) as process:
        descriptors = [os.pidfd_open(int(pipe.read_text())) for pipe in pipes]
        process.send_signal(how)
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 60)[0], "a part still runs"
        os.close(descriptor)
    assert not (tmp_path / "out" / "results.json").exists()


MEETS = """
    import os
    mine, other = (folder.parent.parent / name for name in sys.argv[2:])
    {begin}
    with open(mine, "w") as file:
        file.write("here")
    {end}
"""


@pytest.mark.usefixtures("sixteen_cores")
def test_parts_beside_each_other_run_at_the_same_time_and_the_next_waits(run: Run) -> None:
    """Each of the two ends only when the other has begun: pipes open when both ends are there."""
    listen = "assert open(other).read() == 'here'"
    codes = {
        "a": MEETS.format(begin="", end=listen) + RECORDED,
        "b": MEETS.format(begin=listen, end=""),
    }
    parts = []
    for name, other in (("a", "b"), ("b", "a")):
        os.mkfifo(run.out / f"{name}.pipe")
        part = program(name, codes[name])
        words = (f"{run.out}/{name}.pipe", f"{run.out}/{other}.pipe")
        parts.append(replace(part, settings=words, beside="both", gpus=1))
    run.on_a_gpu()
    parts.append(program("after", "assert 'a ' in open(folder.parent.parent / 'order.txt').read()"))
    assert run(parts) == 0
    assert {name: row["result"] for name, row in run.rows.items()} == dict.fromkeys(
        ("a", "b", "after"), "done"
    )
    assert list(run.rows) == ["a", "b", "after"]


def test_parts_run_one_by_one_in_a_rehearsal_and_without_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [Part("a", 1), Part("b", 1, beside="x"), Part("c", 1, beside="x"), Part("d", 1)]
    shown = []
    for cores, alone in ((8, False), (7, False), (8, True)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        rounds = bench._beside(parts, alone=alone)
        shown.append([[part.name for part in beside] for beside in rounds])
    each = [["a"], ["b"], ["c"], ["d"]]
    assert shown == [[["a"], ["b", "c"], ["d"]], each, each]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_it_leaves_no_process_and_goes_on_where_it_was(run: Run, how: int) -> None:
    """The second part writes its process id and waits."""
    waits = """
        import os, signal
        (folder.parent.parent / "pid").write_text(str(os.getpid()))
        print(f"ready", flush=True)
        signal.pause()
    """
    parts = [program("good", RECORDED), program("long", waits), program("last", RECORDED)]
    words = [(part.name, part.program) for part in parts]
    code = f"""
        import sys
        from benchmarks.gpu import __main__ as bench
        from benchmarks.gpu.parts import Part
        bench.first_table = lambda: [Part(name, 1, program=argv) for name, argv in {words!r}]
        sys.exit(bench.main(["--rehearse", "--out", {str(run.out)!r}]))
    """
    os.mkfifo(run.out / "pid")
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) as process:
        pid = int((run.out / "pid").read_text())
        descriptor = os.pidfd_open(pid)
        process.send_signal(how)
    assert list(run.rows) == ["good"]
    assert select.select([descriptor], [], [], 60)[0], "the part still runs"
    os.close(descriptor)
    (run.out / "pid").unlink()
    assert run([parts[0], program("long", RECORDED), parts[2]]) == 0
    assert run.order == ["good", "long", "long", "last"]
    assert list(run.rows) == ["good", "long", "last"]


def test_results_page_and_archive(run: Run) -> None:
    table = "print('words');print('| a | b |');print('|---|---|');print('| 1 | 2 |')"
    (run.out / "stand_in.py").write_text(table)
    run.monkeypatch.setenv("PYTHONPATH", str(run.out))
    assert run([program("train", RECORDED), Part("other", 1, module="stand_in")]) == 0
    row = run.rows["train"]
    found = row["figures"]
    assert isinstance(found, dict)
    assert found.pop("first step") < 0  # the stand-in's clock is that of 1970
    assert found == {
        "mismatch": 1e-6,
        "paused": 0.25,
        "step": 2.0,
        "peak": 37.8,
        "plan": 41.6,
    }
    assert row["curve"] == [
        {"step": 1, "reward": 0.25, "seconds": 4.0},
        {"step": 2, "reward": 0.5, "mismatch": 1e-6, "seconds": 2.0},
    ]
    page = (run.out / "results.md").read_text()
    assert page.startswith("# On a rehearsal, which says nothing about a GPU: ")
    assert "| 1.0e-06 |  | 0.250 s |  | 2.0 s |  | 37.8 GiB | 41.6 GiB |\n" in page
    assert "## train\n\n| step | reward | mismatch | seconds |\n|---|---|---|---|\n" in page
    assert "| 1 | 0.250 |  | 4.0 |\n| 2 | 0.500 | 1.0e-06 | 2.0 |\n" in page
    assert page.endswith("## other\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    with tarfile.open(run.out / "logs.tar.gz") as archive:
        names = set(archive.getnames())
    wanted = {"results.json", "results.md", "train/output.log", "train/run/metrics.jsonl"}
    assert wanted | {"other/output.log"} <= names
    assert all(Path(name).suffix != ".safetensors" for name in names)


def test_seconds_to_the_first_step_count_from_the_command(tmp_path: Path) -> None:
    lines = "".join(json.dumps(each) + "\n" for each in STEPS)
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert figures(tmp_path, "", 3.0)["figures"]["first step"] == 10.0


def test_results_of_another_machine_or_a_rehearsal_are_not_continued(tmp_path: Path) -> None:
    Record(tmp_path, "no GPU", rehearsal=True).keep("a", {"result": "done", "seconds": 1.0})
    Record(tmp_path, "no GPU", rehearsal=True)
    for machine, rehearsal in (("no GPU", False), ("NVIDIA H200", True)):
        with pytest.raises(SystemExit, match="set --out"):
            Record(tmp_path, machine, rehearsal=rehearsal)


def test_without_a_gpu_it_says_so(run: Run) -> None:
    run.monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match="--rehearse runs"):
        bench.main(["--out", str(run.out)])


def test_part_that_needs_more_gpus_is_left_out_and_is_no_failure(run: Run) -> None:
    run.on_a_gpu()
    assert run([Part("nccl", 2)]) == 0
    assert run.rows["nccl"]["result"] == "needs 2 GPUs"


@pytest.mark.long
def test_exactness_of_a_class_is_kept_and_not_computed_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss: experts, a window and sinks; the float64 reference computes its experts alone."""
    rows = tmp_path / "rows.jsonl"
    words = ["exactness", "--device", "cpu", "--rows", str(rows), "--classes", "gpt-oss"]
    monkeypatch.setattr(sys, "argv", words)
    assert exactness.main() == 0
    kept = {row["type"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert 0 < kept["float32"]["max Δ log p"] < 3e-5
    assert 0 < kept["float32"]["gradient"] < 3e-5
    assert kept["bfloat16"]["mean Δ log p"] > 1e-4
    capfd.readouterr()
    monkeypatch.setattr(exactness, "_by_a_worker", lambda *_: pytest.fail("computed again"))
    assert exactness.main() == 0
    assert capfd.readouterr().out.count("| done |") == 2


def test_class_that_ends_its_process_is_a_row_and_the_next_are_computed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker"
    code = f"""\
        #!{sys.executable}
        import json, sys
        for title in sys.argv[sys.argv.index("--classes") + 1:]:
            for dtype in ("float32", "bfloat16"):
                if (title, dtype) == ("Qwen 3", "bfloat16"):
                    raise SystemExit("CUDA error: an illegal memory access was encountered")
                print(json.dumps({{"class": title, "type": dtype, "result": "done"}}))
    """
    worker.write_text(textwrap.dedent(code))
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    rows = tmp_path / "rows.jsonl"
    words = ["exactness", "--workers", "1", "--rows", str(rows), "--classes"]
    monkeypatch.setattr(sys, "argv", [*words, "Llama 3", "Qwen 3", "gpt-oss"])
    assert exactness.main() == 1
    results = [line.split(" | ")[-1] for line in capfd.readouterr().out.splitlines()[2:]]
    failure = "failed: exit status 1: CUDA error: an illegal memory access was encountered |"
    assert results == ["done |"] * 3 + [failure] + ["done |"] * 2
    assert len(rows.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("title", "moved", "result"),
    [
        ("Qwen 3", 0.0, "done"),
        ("gpt-oss", 0.0, "done"),
        ("Qwen 3", 1e-3, "failed: more than 0.0003"),
        ("Qwen 3", float("nan"), "failed: more than 0.0003, or not finite"),
    ],
)
def test_difference_above_the_tolerance_fails(title: str, moved: float, result: str) -> None:
    batch = build_batch(make_groups(exactness.PATHS, VOCABULARY))
    small = shrunk(exactness.CLASSES[title].settings())
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    weights = torch.ones(batch.num_tokens)
    logprobs, gradients = exactness.reference(model, batch, weights)
    assert logprobs.dtype == torch.float64
    logprobs[7] += moved
    use_packed_rows(model)
    exact, cpu = (logprobs, gradients), torch.device("cpu")
    row = exactness.compare(model, batch, weights, exact, torch.float32, cpu)
    assert row["result"].startswith(result)


def test_reference_knows_every_class_of_the_models_page() -> None:
    page = Path("docs/models.md").read_text().partition("<!-- trained -->")[2]
    rows = page.partition("<!-- end -->")[0].strip().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(exactness.CLASSES)


H100 = Gpu("NVIDIA H100 80GB", 80 * 2**30)


@pytest.mark.parametrize("name", ["quickstart", "sleep", "weight updates", "adapter"])
def test_training_run_of_the_first_table_fits_on_one_gpu_by_the_plan(
    name: str, tmp_path: Path
) -> None:
    (part,) = [each for each in first_table() if each.name == name]
    wide_model.wide().save_pretrained(tmp_path / "model")
    files = [Path(word) for word in part.program if word.endswith(".yaml")]
    config = load(files, part.words(str(tmp_path), rehearse=False))
    plan = plan_devices(config, [H100])
    assert plan is not None
    (line,) = plan.describe()
    assert PLAN.search(line), line
    rehearsal = load(files, part.words(str(tmp_path), rehearse=True))
    assert plan_devices(rehearsal, [H100]) is None  # it uses no GPU, also where there is one


def test_wide_model_has_its_size_type_and_the_quickstarts_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(wide_model.wide())
    assert 1.40e9 < sum(each.numel() for each in model.parameters()) < 1.42e9
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    monkeypatch.setattr(wide_model, "SHAPE", wide_model.SHAPE | small)
    monkeypatch.setattr(
        sys, "argv", ["wide_model", "--out", str(tmp_path / "m"), "--device", "cpu"]
    )
    wide_model.main()
    assert checkpoint_type(tmp_path / "m") == "bfloat16"
    assert {each.dtype for each in load_file(tmp_path / "m" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    prompt = "What does an apple cost?"
    ids = [
        AutoTokenizer.from_pretrained(each)(prompt) for each in (tmp_path / "m", wide_model.STARTER)
    ]
    assert ids[0] == ids[1]
