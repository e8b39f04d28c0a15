"""Model files that fail in every way and place: one message, exit code 1, and not a line of this package's traceback."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path

import pytest

from meganeura_aot.cli import main


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("old.py").write_text("old")
    return Path("model.py")


def refused(model: Path, capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """The one message of a model that is not compiled."""
    search, modules = sys.path, sys.modules
    assert main([str(model), "-o", "old.py"]) == code
    assert sys.path is search and sys.modules is modules
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("meganeura-aot: ") and shown.err.count("meganeura-aot: ") == 1
    assert "meganeura_aot/" not in shown.err, "a frame of ours"
    assert Path("old.py").read_text() == "old" and not Path("out").exists()
    return shown.err


# ---- exceptions of every kind, in every place

KINDS = sorted(
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, KeyboardInterrupt)
)
WAYS = {name: f"{name}('no luck')" for name in KINDS}
WAYS |= {
    "UnicodeDecodeError": "UnicodeDecodeError('utf-8', b'x', 0, 1, 'no luck')",
    "UnicodeEncodeError": "UnicodeEncodeError('utf-8', 'x', 0, 1, 'no luck')",
    "UnicodeTranslateError": "UnicodeTranslateError('x', 0, 1, 'no luck')",
    "BaseExceptionGroup": "BaseExceptionGroup('no luck', [ValueError()])",
    "ExceptionGroup": "ExceptionGroup('no luck', [ValueError()])",
    "CancelledError": "__import__('asyncio').CancelledError('no luck')",
    "GraphError of the model": "__import__('meganeura_aot').GraphError('no luck')",
    "SystemExit 0": "SystemExit(0)",
    "a class of its own": "type('Mine', (BaseException,), {})('no luck')",
    "one without a text": "type('Mine', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "one whose text exits": "type('Mine', (Exception,), {'__str__': lambda self: sys.exit(0)})()",
    "one whose text is a number": "type('Mine', (Exception,), {'__str__': lambda self: 1})()",
    "a GraphError without a text": "__import__('meganeura_aot').GraphError(Odd())",
    "a SyntaxError of odd parts": "SyntaxError('no luck', ('f', 'line', [], 5))",
    "a SyntaxError of odder parts": "SyntaxError(Odd(), (Odd(), 1, Odd(), Odd()))",
    "odd notes": "noted(ValueError('no luck'), [Odd(), 3])",
    "odder notes": "noted(ValueError('no luck'), Odd())",
    "lone surrogates": "ValueError('\\udc80\\0')",
}
PLACES = {
    "at import": "raise {way}",
    "in build": "def build():\n    raise {way}",
    "in items": (
        "class M(collections.abc.Mapping):\n    def __getitem__(self, name): raise {way}\n"
        "    def __iter__(self): raise {way}\n    def __len__(self): return 1\n"
        "def build():\n    return M()"
    ),
    "in the class": ("class C:\n    @property\n    def __class__(self): raise {way}\ndef build():\n    return C()"),
    "in the signature": (
        "class B:\n    def __call__(self): pass\n    @property\n    def __signature__(self): raise {way}\nbuild = B()"
    ),
    "in a repr": (
        "class R:\n    def __repr__(self): raise {way}\n"
        "def build():\n    return meganeura_aot.Graph().input('x', R())"
    ),
}
# Exceptions that do not come through, by place: Python takes them for the end of the items, or for a missing __signature__,
# or `inspect.signature` raises them for a builtin that has no signature.
SWALLOWED = {
    "in items": {"StopIteration"},
    "in the signature": {
        "AttributeError",
        "GraphError of the model",
        "UnicodeDecodeError",
        "UnicodeEncodeError",
        "UnicodeError",
        "UnicodeTranslateError",
        "ValueError",
        "odd notes",
        "odder notes",
    },
}
BEFORE = """import collections.abc, meganeura_aot, sys
class Odd:
    def __repr__(self): return 1 / 0
def noted(error, notes):
    error.__notes__ = notes
    return error
"""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_of_the_model(model: Path, capsys: pytest.CaptureFixture[str], way: str, place: str) -> None:
    model.write_text(BEFORE + PLACES[place].format(way=WAYS[way]))
    message = refused(model, capsys)
    assert "model.py" in message
    if "no luck" in WAYS[way] and way not in SWALLOWED.get(place, ()):
        assert "no luck" in message


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_is_no_failure_of_the_model(model: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    model.write_text(BEFORE + PLACES[place].format(way="KeyboardInterrupt"))
    assert refused(model, capsys, code=130) == "meganeura-aot: interrupted\n"


# ---- what is no Python


SOURCES: dict[str, tuple[bytes, str]] = {
    "20 000 unary minus signs": (b"x = " + b"-" * 20_000 + b"1", "nested too deeply for Python's compiler"),
    "5 000 unary minus signs": (b"x = " + b"-" * 5_000 + b"1", "nested too deeply for Python's compiler"),
    "20 000 times not": (b"x = " + b"not " * 20_000 + b"1", "nested too deeply for Python's compiler"),
    "a long sum": (b"x = " + b"+".join([b"1"] * 100_000), "nested too deeply for Python's compiler"),
    "20 000 brackets": (b"x = " + b"(" * 20_000, "too many nested parentheses"),
    "20 000 minus signs at run time": (b"eval('-' * 20_000 + '1')", "MemoryError"),
    "endless recursion": (b"def f():\n    f()\nf()", "RecursionError"),
    "no memory": (b"bytes(1 << 60)", "MemoryError"),
    "not UTF-8": (b"x = '\xff'", "utf-8"),
    "UTF-16": ("x = 1".encode("utf-16"), "null bytes"),
    "a null byte": (b"x = 1\0", "null bytes"),
    "an unknown encoding": (b"# coding: nonsense\n", "nonsense"),
    "an encoding that is none": (b"# coding: base64\nx = 1", "base64"),
    "a number of many digits": (b"x = " + b"9" * 5_000, "4300 digits"),
    "tabs and spaces": (b"if 1:\n\tx = 1\n        y = 2", "TabError"),
    "binary": (bytes(range(256)), "SyntaxError"),
    "empty": (b"", "expected a function `build` or a variable `graph`"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_python_does_not_take(model: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    source, message = SOURCES[kind]
    model.write_bytes(source)
    text = refused(model, capsys)
    assert text.startswith("meganeura-aot: model.py: ") and message in text


def test_a_folder_and_a_pipe_as_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model.mkdir()
    assert refused(model, capsys) == "meganeura-aot: model.py: expected a Python file, got a folder\n"
    model.rmdir()
    os.mkfifo(model)
    assert refused(model, capsys) == "meganeura-aot: model.py: expected a Python file, got a pipe or a device\n"


def test_names_that_no_file_has(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such model file" in refused(Path("a\0b.py"), capsys, code=2)
    assert "File name too long" in refused(Path("n" * 300 + ".py"), capsys)


# ---- results that are odd

ODD = {
    "a number as a name": ("{3: g}", "build() returned a dict of int as names, expected"),
    "a name without a repr": ("{Odd(): g}", "build() returned a dict of Odd as names, expected"),
    "a value without a repr": ("{'run': Odd()}", "build() returned a dict of Odd, expected"),
    "no repr": ("Odd()", "build() returned Odd, expected"),
    "the class": ("meganeura_aot.Graph", "build() returned type, expected"),
    "a generator": ("(g for _ in '1')", "build() returned generator, expected"),
    "items that are no pairs": ("type('M', (dict,), {'items': lambda self: [1]})(run=g)", "TypeError"),
    "items that cannot be hashed": ("type('M', (dict,), {'items': lambda self: [([], 1)]})(run=g)", "TypeError"),
    "a graph that was never begun": (
        "meganeura_aot.Graph.__new__(meganeura_aot.Graph)",
        "the model raised\nAttributeError",
    ),
    "one that claims to be a graph": (
        "type('L', (), {'__class__': property(lambda self: meganeura_aot.Graph)})()",
        "the model raised\nAttributeError",
    ),
    "an odd truth": ("type('M', (dict,), {'__bool__': lambda self: 1 / 0})()", "a dict of nothing, expected"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_result(model: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    result, message = ODD[kind]
    model.write_text(f"{BEFORE}def build():\n    g = meganeura_aot.Graph()\n    return {result}\n")
    assert message in refused(model, capsys)


def test_any_mapping_of_graphs_is_taken(model: Path) -> None:
    source = "    g = meganeura_aot.Graph()\n    g.set_outputs({'y': g.input('x', (2,)) * 2.0})\n"
    result = "types.MappingProxyType(collections.OrderedDict(first=g, second=g))"
    model.write_text(f"{BEFORE}import types\ndef build():\n{source}    return {result}\n")
    assert main([str(model), "-o", "new.py"]) == 0
    assert "def encode_second" in Path("new.py").read_text()


@pytest.mark.parametrize("spoils", ["sys.path = None", "sys.path = ()", "sys.path.clear()", "del sys.path"])
def test_a_model_that_spoils_the_search_path(model: Path, capsys: pytest.CaptureFixture[str], spoils: str) -> None:
    before = list(sys.path)
    model.write_text(f"{BEFORE}{spoils}\nraise ValueError('no luck')\n")
    assert "no luck" in refused(model, capsys)
    assert sys.path == before
