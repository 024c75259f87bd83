"""The commands: fast help, one line per error, a doctor that survives what it examines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanopd
from nanopd.cli import app as app_module
from nanopd.cli import bench, doctor
from nanopd.cli.app import run
from nanopd.cli.doctor import Finding
from nanopd.cli.generate import describe
from nanopd.course.exercises import nb00
from nanopd.course.progress import Progress
from nanopd.engine.outputs import RequestMetrics
from nanopd.errors import ModelLoadError, StepFailedError, UnknownRequestError

COMMANDS = (
    "doctor", "generate", "prepare", "bench-kernels", "bench-engine", "profile", "bench", "route", "simulate",
    "progress",
)  # fmt: skip
CACHE = os.environ.get("NANOPD_CACHE")  # where the real model is; each test gets an empty folder instead


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "matplotlib", "nanopd.engine", "nanopd.model"}
    code = (
        "import sys; from nanopd.cli.app import run; code = run(['--help'])\n"
        f"print('HEAVY', sorted({heavy!r} & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    for command in COMMANDS:
        assert command in done.stdout


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert run([command, "--help"]) == 0
        assert "Usage: nanopd " + command in capsys.readouterr().out


def test_version_and_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"nanopd {nanopd.__version__}\n"
    assert run(["fly"]) == 2
    assert "fly" in capsys.readouterr().err


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "nanopd.cli", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.startswith("nanopd ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
@pytest.mark.parametrize("command", [["--version"], ["progress"]])
def test_a_full_disk_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "nanopd.cli", *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.startswith("nanopd: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_terminal_without_unicode_still_gets_the_table() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    command = [sys.executable, "-m", "nanopd.cli", "progress"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "exercises solved" in done.stdout


def test_a_cache_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path / "file"))
    assert doctor.check_disk().status == "warn"
    assert "no folder" in doctor.check_disk().found
    assert run(["progress"]) == 0
    assert run(["progress", "--reset", "--yes"]) == 1
    assert capsys.readouterr().err.startswith("nanopd: ")


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ModelLoadError("no such model"), 1, "nanopd: no such model\n"),
        (StepFailedError("out of memory"), 1, "nanopd: out of memory\n"),
        (UnknownRequestError("no request 'x'"), 1, "nanopd: no request 'x'\n"),
    ],
)
def test_our_errors_are_one_line(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(app_module, "app", fail)
    assert run(["doctor"]) == code
    assert capsys.readouterr().err == line


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(app_module, "app", fail)
    with pytest.raises(RuntimeError):
        run(["doctor"])


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--temperature", "-1"], 2, "temperature"),
        (["--top-p", "0"], 2, "top_p"),
        (["--n", "0"], 2, "n must be in [1, 65536]"),
        (["--model", "no_such_model"], 1, "no_such_model"),
        (["--model", "dummy:tiny", "--device", "cpu"], 2, "no tokenizer"),
        (["--device", "moon"], 2, "moon"),
        (["--max-tokens", "many"], 2, "--max-tokens"),
        (["--processes"], 2, "--processes is about workers"),
        (["--collocated", "cuda:0/sm=8", "--processes"], 2, "an SM partition is for one process"),
    ],
)
def test_generate_refuses(options: list[str], code: int, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", *options]) == code
    captured = capfd.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_generate_streams_and_writes_only_text_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The pieces add up to the text that ``LLM.generate`` returns; statistics go elsewhere."""
    from nanopd import LLM, SamplingParams
    from nanopd.model.embedded import embedded_folder

    monkeypatch.setenv("NANOPD_CACHE", CACHE) if CACHE else monkeypatch.delenv("NANOPD_CACHE")
    if not (embedded_folder() / "config.json").is_file():
        pytest.skip("the embedded model is not converted; run: nanopd prepare")
    prompt, options = "The capital of France is", ["--device", "cpu", "--temperature", "0", "--max-tokens", "8"]
    assert run(["generate", prompt, *options]) == 0
    captured = capfd.readouterr()
    llm = LLM("smollm2", device="cpu")
    (expected,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert captured.out == expected.outputs[0].text + "\n"
    assert "Paris" in captured.out
    assert "8 generated" in captured.err


def test_statistics_line() -> None:
    metrics = RequestMetrics(
        arrival_time=1.0, first_scheduled_time=1.0, first_token_time=1.25, last_token_time=1.5, finished_time=1.5,
        num_output_tokens=6, num_cached_tokens=0, num_preemptions=0, tpot=0.05, second_token_gap=0.05,
    )  # fmt: skip
    assert (
        describe(metrics, 9)
        == "[9 prompt tokens, 6 generated, first after 250 ms, then 50.0 ms each (20.0 per second)]"
    )


# --- doctor ----------------------------------------------------------------------------------------------------


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {finding["what"]: finding for finding in report["findings"]}
    assert report["usable"] is True
    assert list(found) == [what for what, _ in doctor.CHECKS]
    assert found["torch"]["status"] == "ok"
    assert "compiled a kernel for sm_" in found["NVRTC"]["found"] or found["NVRTC"]["status"] != "ok"
    # the cache folder of this test is empty: the model is missing, and the command that makes it is named
    assert found["embedded model"]["status"] == "warn"
    assert found["embedded model"]["fix"]
    assert not (tmp_path / "cache").exists(), "doctor looks, it changes nothing"


def test_doctor_names_a_command_for_everything_missing(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("torch", "fail", "No module named torch [extra]", "python -m pip install torch"),
        Finding("GPU", "note", "none"),
        Finding("disk", "warn", "1 GB", "free some space"),
    ]
    assert doctor.report(findings=findings) == 1
    out = capsys.readouterr().out
    assert "No module named torch [extra]" in out
    assert "torch: python -m pip install torch\n" in out
    assert "disk: free some space" in out
    assert "cannot run here yet" in out
    assert doctor.report(findings=findings[1:]) == 0


def test_doctor_survives_a_check_that_raises() -> None:
    def broken() -> Finding:
        raise OSError("libcuda.so.1: cannot open shared object file\nmore")

    (finding,) = doctor.examine([("GPU", broken)])
    assert (finding.what, finding.status) == ("GPU", "warn")
    assert finding.found == "could not be checked: libcuda.so.1: cannot open shared object file"
    assert finding.fix


def test_doctor_sees_missing_packages_and_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = doctor.check_packages("JupyterLab", ["jupyterlab", "no-such-package"])
    assert missing.status == "warn"
    assert "no-such-package" in missing.found
    assert "pip install" in missing.fix
    assert missing.fix.endswith("no-such-package")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1e8})())
    assert doctor.check_disk().status == "warn"
    assert "NANOPD_CACHE" in doctor.check_disk().fix


def test_doctor_sees_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(doctor, "nvidia_smi", lambda field: ["NVIDIA H200"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor.check_torch().status == "warn"
    assert "torch" in doctor.check_torch().fix
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert doctor.check_gpu().status == "warn"
    assert "driver" in doctor.check_gpu().fix
    assert "cu13" in doctor.cuda_core_fix()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "cu12" in doctor.cuda_core_fix()


def test_doctor_compiles_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanopd.errors import CudaUnavailableError
    from nanopd.ops import compiler

    def refuse(*_: object, **__: object) -> bytes:
        raise CudaUnavailableError("no NVRTC here\ndetails")

    monkeypatch.setattr(compiler, "compile_source", refuse)
    finding = doctor.check_nvrtc()
    if finding.status != "note":  # macOS
        assert (finding.status, finding.found) == ("warn", "no NVRTC here")
        assert "cuda-core" in finding.fix


# --- progress, benchmarks --------------------------------------------------------------------------------------


def test_progress(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["progress"]) == 0
    assert "0 of " in capsys.readouterr().out
    Progress(cache / "progress.json").count_attempt("00", "step_intensity", solved=True)
    assert run(["progress"]) == 0
    out = capsys.readouterr().out
    assert "1 of " in out
    assert "✓" in out
    assert nb00.step_intensity.name in out
    assert run(["progress", "--reset", "--yes"]) == 0
    record = {"notebooks": {"00": {"step_intensity": {"solved_at": "[/bold]"}}}}  # not ours, and no reason to fail
    (cache / "progress.json").write_text(json.dumps(record))
    assert run(["progress"]) == 0
    assert "[/bold]" in capsys.readouterr().out
    assert run(["progress", "--reset", "--yes"]) == 0
    assert run(["progress"]) == 0
    assert "0 of " in capsys.readouterr().out


def test_benchmark_results_are_shown_by_the_path_that_texts_cite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanopd.ops import benchmark

    values = {"decode": {"b32": {"ms": 1.25, "of_copy": 0.8}}, "runs": [3, 4], "m[/b]": "m[red]"}
    assert list(bench.leaves(values)) == [
        ("decode.b32.ms", 1.25), ("decode.b32.of_copy", 0.8), ("runs.0", 3), ("runs.1", 4), ("m[/b]", "m[red]"),
    ]  # fmt: skip
    monkeypatch.setattr(benchmark, "bench_kernels", lambda device, dtype: values)
    assert run(["bench-kernels", "--device", "cpu", "--out", str(tmp_path / "a" / "kernels.json")]) == 0
    shown = capsys.readouterr().out
    assert "decode.b32.of_copy" in shown and "m[/b]" in shown and "m[red]" in shown
    written = json.loads((tmp_path / "a" / "kernels.json").read_text())
    assert written["values"] == values
    assert written["torch"]


def test_the_cpu_has_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("nanopd.ops.benchmark.bench_kernels", lambda *_: pytest.fail("measured"))
    assert run(["bench-kernels", "--device", "cpu:7"]) == 2
    assert "device cpu:7 is none" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_refused_before_the_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr("nanopd.ops.benchmark.bench_kernels", lambda *_: pytest.fail("measured first"))
    monkeypatch.setattr("nanopd.engine.benchmark.bench_engine", lambda *_: pytest.fail("measured first"))
    for command in ("bench-kernels", "bench-engine"):
        for name in ("file/x.json", "loop"):
            assert run([command, "--device", "cpu", "--out", str(tmp_path / name)]) == 2
            assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--prefill", "cpu"], 2, "decode"),
        (["--prefill", "cpu/sm=8", "--decode", "cpu"], 2, "sm=8"),
        (["--prefill", "cpu", "--decode", "cpu", "--device", "cpu"], 2, "--device cpu"),
        (["--collocated", "moon"], 2, "moon"),
    ],
)
def test_generate_refuses_places(options: list[str], code: int, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "hello", *options]) == code
    captured = capfd.readouterr()
    assert says in captured.err and "Traceback" not in captured.err and captured.out == ""


@pytest.mark.parametrize("places", [["--collocated", "cpu"], ["--prefill", "cpu", "--decode", "cpu"]], ids=" ".join)
def test_generate_on_workers_writes_the_same_text(
    places: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from nanopd import LLM, SamplingParams
    from nanopd.model.embedded import embedded_folder

    monkeypatch.setenv("NANOPD_CACHE", CACHE) if CACHE else monkeypatch.delenv("NANOPD_CACHE")
    if not (embedded_folder() / "config.json").is_file():
        pytest.skip("the embedded model is not converted; run: nanopd prepare")
    prompt = "The capital of France is"
    assert run(["generate", prompt, *places, "--temperature", "0", "--max-tokens", "8"]) == 0
    captured = capfd.readouterr()
    llm = LLM("smollm2", device="cpu")
    (expected,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert captured.out == expected.outputs[0].text + "\n"
    assert "8 generated" in captured.err and "worker" in captured.err
