"""The command line, as users meet it: exit codes, one clear message, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meganeura_aot.cli import main

GOOD = """
from meganeura_aot import Graph

def build(size: int = 4, kind="relu"):
    g = Graph()
    x = g.input("x", (size,))
    g.set_outputs({"y": getattr(g, kind)(x)})
    return g
"""

BAD_MODELS = {
    "raises": ("def build():\n    return 1 / 0\n", "ZeroDivisionError", 1),
    "raises at import": ("raise ValueError('no luck')\n", "no luck", 1),
    "cancels": ("import asyncio\nraise asyncio.CancelledError('gone')\n", "CancelledError", 1),
    "builtin as build": ("build = dict\n", "a dict of nothing", 1),
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit", 1),
    "syntax": ("def build(:\n", "SyntaxError", 1),
    "null byte": ("x = 1\0\n", "null bytes", 1),
    "nothing": ("x = 1\n", "expected a function `build` or a variable `graph`, found neither", 1),
    "returns text": ("def build():\n    return 'text'\n", "build() returned str, expected a Graph", 1),
    "returns nothing": ("def build():\n    pass\n", "build() returned NoneType", 1),
    "empty dict": ("def build():\n    return {}\n", "a dict of nothing", 1),
    "wrong dict": ("def build():\n    return {'run': 3}\n", "a dict of int", 1),
    "build is no function": ("build = 3\n", "expected `build` to be a function, got int", 1),
    "graph is wrong": ("graph = 3\n", "`graph` is int", 1),
    "needs an argument": ("def build(n):\n    pass\n", "build needs n: give --set n=VALUE", 2),
    "no outputs": ("from meganeura_aot import Graph\ngraph = Graph()\n", "model.py: graph: expected outputs", 1),
    "bad shapes": (
        "from meganeura_aot import Graph\ng = Graph()\ng.input('x', (2,)) + g.input('y', (3,))\n",
        "model.py:3",
        1,
    ),
    "bad entry": (
        (
            "from meganeura_aot import Graph\ng = Graph()\ng.set_outputs([g.input('x', (2,)) * 1.0])\n"
            "def build():\n    return {'reset': g}\n"
        ),
        "entry point 'reset'",
        1,
    ),
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.py"
    path.write_text(GOOD)
    return path


def test_writes_a_runner(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model)]) == 0
    assert "out/model.py: 1 dispatches, 1 pipelines, 2 buffers" in capsys.readouterr().out
    text = Path("out/model.py").read_text()
    assert '"""model: 1 dispatches' in text
    assert "Rebuild:  meganeura-aot model.py " in text
    assert str(model.parent) not in text


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_model(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, message, code = BAD_MODELS[name]
    model.write_text(source)
    Path("old.py").write_text("old")
    assert main([str(model), "-o", "old.py"]) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert "meganeura_aot/" not in shown.err, "a frame of ours"
    assert shown.err.startswith("meganeura-aot: ")
    assert Path("old.py").read_text() == "old"
    assert sorted(os.listdir()) == ["model.py", "old.py"]


QUIRKS = {
    "late imports": "def build():\n    import sizes\n    from meganeura_aot import Graph\n    return sizes.make(Graph())\n",
    "dataclass inside build": (
        "from __future__ import annotations\nimport dataclasses, sizes\nfrom meganeura_aot import Graph\n"
        "def build():\n    @dataclasses.dataclass\n    class C:\n        n: int\n    return sizes.make(Graph())\n"
    ),
    "prints": "print('hello')\nimport sizes\nfrom meganeura_aot import Graph\ngraph = sizes.make(Graph())\n",
    "changes folder": "import os, sizes\nfrom meganeura_aot import Graph\nos.chdir('/')\ngraph = sizes.make(Graph())\n",
    "empties the path": "import sys, sizes\nfrom meganeura_aot import Graph\nsys.path.clear()\ngraph = sizes.make(Graph())\n",
    "parameters called as ours": (
        "import sizes\nfrom meganeura_aot import Graph\ndef build(path=1, function=2):\n    return sizes.make(Graph())\n"
    ),
}


@pytest.mark.parametrize("name", QUIRKS)
def test_quirk(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sizes.py").write_text("def make(g):\n    g.set_outputs([g.input('x', (2,)) * 2.0])\n    return g\n")
    model.write_text(QUIRKS[name])
    settings = ["--set", "path=5", "--set", "function=6"] if "parameters" in name else []
    assert main(["model.py", "-o", "r.py", *settings]) == 0
    os.chdir(model.parent)
    assert "mul_0" in Path("r.py").read_text()
    assert "hello" not in capsys.readouterr().out


def test_links_and_devices(model: Path) -> None:
    """A link stays a link, and a pipe or a device is not replaced by a file."""
    Path("target.py").write_text("old")
    Path("link.py").symlink_to("target.py")
    assert main(["model.py", "-o", "link.py"]) == 0
    assert Path("link.py").is_symlink()
    assert "class Runner" in Path("target.py").read_text()
    assert main(["model.py", "-o", os.devnull]) == 0
    assert not Path(os.devnull).is_file()
    assert main(["model.py", "-o", "n" * 252 + ".py"]) == 0


def test_the_command_in_the_header_can_be_pasted(model: Path) -> None:
    assert main(["model.py", "--set", "kind='relu' ", "-o", "r.py"]) == 0
    assert "meganeura-aot model.py --set 'kind='\"'\"'relu'\"'\"' '" in Path("r.py").read_text()
    assert main(["model.py", "--set", "size=2", "--set", "kind=relu\r", "-o", "r.py"]) == 1


@pytest.mark.parametrize("value", ["n={[]:1}", "n={[1]}", "n=" + "-" * 9000 + "1", "n=\udc80"])
def test_strange_settings(value: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model.py", "--set", value]) == 2
    assert "build takes size, kind" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_nobody_takes(model: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONUNBUFFERED": ""}
    command = f"{sys.executable} -m meganeura_aot model.py --emit plan"
    for shell, code in ((f"{command} > /dev/full", 1), (f"{command} | true; exit $PIPESTATUS", 0)):
        done = subprocess.run(["bash", "-c", shell], env=environment, capture_output=True, text=True)
        assert (done.returncode, "Exception ignored" in done.stderr, "Traceback" in done.stderr) == (code, False, False)


def test_missing_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.py"]) == 2
    assert "nowhere.py: no such model file" in capsys.readouterr().err


def test_settings(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--set", "size=7", "--set", "kind=tanh", "--emit", "graph"]) == 0
    assert capsys.readouterr().out == "%0 = input x : f32[7]\n%1 = tanh(%0) : f32[7]\noutput y = %1\n"
    assert main([str(model), "--set", "width=7"]) == 2
    assert "build takes size, kind" in capsys.readouterr().err
    assert main([str(model), "--set", "size"]) == 2
    assert "expected key=value" in capsys.readouterr().err
    assert main([str(model), "--set", "size=7", "-o", "r.py"]) == 0
    assert "Rebuild:  meganeura-aot model.py --set size=7 " in Path("r.py").read_text()


@pytest.mark.parametrize("stage", ["graph", "opt", "plan", "runner"])
def test_emit_prints_and_writes_nothing(stage: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--emit", stage]) == 0
    assert "relu" in capsys.readouterr().out
    assert os.listdir() == ["model.py"]


def test_wrong_usage(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--emit", "gradient"], ["--train", "lion"], ["--target", "gpu"], ["--no-such-option"]):
        with pytest.raises(SystemExit) as stop:
            main([str(model), *arguments])
        assert stop.value.code == 2
    assert main([str(model), "--emit", "plan", "--check"]) == 2
    assert main([str(model), "-o", str(model)]) == 2
    assert main([str(model), "-o", "."]) == 2
    assert model.read_text() == GOOD


def test_check(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--check"]) == 1
    assert "found no file" in capsys.readouterr().err
    assert main([str(model)]) == 0
    assert main([str(model), "--check"]) == 0
    out = Path("out/model.py")
    out.write_text(out.read_text().replace("nbytes=16", "nbytes=17", 1))
    capsys.readouterr()
    assert main([str(model), "--check"]) == 1
    shown = capsys.readouterr()
    assert "nbytes=17" in next(line for line in shown.out.splitlines() if line.startswith("-") and "b_x" in line)
    assert f"out of date; rebuild it with meganeura-aot {model} -o out/model.py" in shown.err
    out.write_bytes(out.read_bytes().replace(b"nbytes=17", b"nbytes=16", 1).replace(b"\n", b"\r\n"))
    assert main([str(model), "--check"]) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs a POSIX system")
def test_a_file_that_cannot_be_written(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("in the way")
    assert main([str(model), "-o", "file/runner.py"]) == 1
    assert "file" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["file", "model.py"]


def test_report(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(model), "--report", "-v"]) == 0
    shown = capsys.readouterr()
    for label in ("nodes", "dispatches", "distinct pipelines", "lower bound", "memory in all"):
        assert label in shown.out
    assert "wrote out/model.py" in shown.err


def test_several_entry_points(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.write_text(GOOD + "\nbuild_one = build\ndef build():\n    return {'a': build_one(), 'b': build_one(5)}\n")
    assert main([str(model), "--emit", "graph"]) == 0
    assert "==== a ====" in capsys.readouterr().out
    assert main([str(model)]) == 0
    assert "def encode_b(self, encoder):" in Path("out/model.py").read_text()


def test_same_bytes_whatever_the_hash_seed_the_folder_and_the_name(model: Path) -> None:
    """Three hash seeds, two folders, two names: one file."""
    other = model.parent / "elsewhere"
    other.mkdir()
    (other / "model.py").write_text(GOOD)
    texts = set()
    for seed, folder, out in (("0", ".", "a.py"), ("1", "elsewhere", "b.py"), ("77", ".", "c.py")):
        command = [sys.executable, "-m", "meganeura_aot", "model.py", "-o", out]
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
        texts.add((Path(folder) / out).read_bytes())
    assert len(texts) == 1


def test_modules_beside_the_model(model: Path) -> None:
    Path("numbers_of_mine.py").write_text("SIZE = 9\n")
    model.write_text(
        GOOD.replace("import Graph", "import Graph\nfrom numbers_of_mine import SIZE").replace(
            "size: int = 4", "size=SIZE"
        )
    )
    assert main([str(model)]) == 0
    assert "f32[9]" in Path("out/model.py").read_text()


# ---- training

TRAINED = """
from meganeura_aot import Graph

def part(weight):
    g = Graph()
    x = g.input("x", (4, 3))
    g.set_outputs({"loss": g.mean(g.tanh(x @ g.parameter("body." + weight, (3, 2)) @ g.parameter("head", (2, 1))))})
    return g

def build(several=False, name="train"):
    return {name: part("w"), "other": part("w")} if several else part("w")
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("trained.py").write_text(TRAINED)
    return Path("trained.py")


def test_train(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--train", "adamw", "--opt", "lr=1e-4", "--opt", "lr_mult.head=0.5", "--freeze", "body.*"]
    assert main([str(trained), *options, "-o", "trainer.py"]) == 0
    text = Path("trainer.py").read_text()
    assert "meganeura-aot trained.py --train adamw --opt lr=1e-4 --opt lr_mult.head=0.5 --freeze 'body.*'" in text
    assert '"lr": 0.0001' in text
    assert "1 of 2 parameters" in text
    assert main([str(trained), *options, "-o", "trainer.py", "--check"]) == 0
    assert main([str(trained), *options[:2], "-o", "trainer.py", "--check"]) == 1
    assert "optimizer_defaults" in capsys.readouterr().out


def test_emit_grad(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained), "--train", "sgd", "--emit", "grad"]) == 0
    text = capsys.readouterr().out
    assert "==== accumulate ====" in text
    assert "==== apply ====" in text
    assert "gradient body.w = %" in text
    assert "sgd_update" in text
    assert not Path("out").exists()


WRONG_TRAINING = {
    "emit grad": (["--emit", "grad"], "--emit grad: needs --train"),
    "opt": (["--opt", "lr=1"], "--opt: needs --train"),
    "freeze": (["--freeze", "*"], "--freeze: needs --train"),
    "several": (
        ["--train", "sgd", "--set", "several=True", "--set", "name=fit_it"],
        "expected an entry point `train` or one alone, got fit_it, other",
    ),
    "unknown": (["--train", "sgd", "--opt", "speed=1"], "--opt: training: sgd takes lr, momentum"),
    "no value": (["--train", "sgd", "--opt", "lr"], "--opt lr: expected key=value"),
    "text": (["--train", "sgd", "--opt", "lr=fast"], "a finite number >= 0 as lr, got 'fast'"),
}


@pytest.mark.parametrize("case", WRONG_TRAINING)
def test_wrong_training_is_wrong_usage(case: str, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG_TRAINING[case]
    assert main([str(trained), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_failures_of_training_are_named(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trained), "--train", "sgd", "--freeze", "tail.*"]) == 1
    assert "freeze 'tail.*': expected a pattern of body.w, head" in capsys.readouterr().err
    assert main([str(trained), "--train", "sgd", "--freeze", "*"]) == 1
    assert "expected a parameter that is trained behind it, found none, or all frozen" in capsys.readouterr().err
