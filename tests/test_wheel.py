"""The wheel, built from the sdist and installed where the checkout is not on the path, compiles a model."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the wheel; its dependencies are borrowed from this environment.

    A path named in a .pth file is not searched for more .pth files, so an editable install here does not count there.
    """
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / "python"
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    borrowed = {str(Path(module.__file__ or "").parents[1]) for module in map(__import__, ("numpy", "wgpu", "black"))}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n", encoding="utf-8")
    return scripts


def test_distributions_hold_the_data(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for folder in ("shaders", "runtime_stub"):
        files = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.*") if path.is_file()}
        files = {name for name in files if not re.search(r"(^|/)(\.|__pycache__)", name)}
        assert files
        assert files <= in_sdist
        assert files == {name.removeprefix("meganeura_aot/_data/") for name in in_wheel if f"/_data/{folder}/" in name}
    strangers = {name.split("/")[0] for name in in_wheel} - {"meganeura_aot"}
    assert all(name.endswith(".dist-info") for name in strangers)
    assert not [name for name in in_sdist if name.startswith((".venv", ".cache", ".git/"))]


def test_installed_wheel_compiles(installed: Path, tmp_path: Path) -> None:
    python = installed / "python"
    where = run(python, "-c", "import meganeura_aot; print(meganeura_aot.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    assert "0.1.0" in run(installed / "meganeura-aot", "--version", cwd=tmp_path)

    shutil.copy(ROOT / "examples" / "digits_mlp.py", tmp_path)
    run(installed / "meganeura-aot", "digits_mlp.py", "-o", "runner.py", cwd=tmp_path)
    golden = (ROOT / "out" / "digits_mlp.py").read_text(encoding="utf-8")
    assert (tmp_path / "runner.py").read_text(encoding="utf-8") == golden
    listing = run(python, "-I", "runner.py", "--list", cwd=tmp_path)
    assert "fc1.weight" in listing
    assert "probabilities" in listing
