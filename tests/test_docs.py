"""The documentation is true: the pages build without a warning, every public name is on one, and every code block of
README and the pages runs.

The blocks of a page run in order, in one namespace and one empty folder with `examples` in it. README's find a small
model there (`NAMES`). A block that cannot run here has a comment `<!-- not run: why -->` before it, and is listed as
skipped. Python blocks with a title are files."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forge_ugc
from forge_ugc.cli import main
from tests import ze_client

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = {"python", "sh"}
PROSE = {"text", "{toctree}", "{include}", "{eval-rst}"}  # output, drawings, and what Sphinx puts in
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\s`]*)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass
class Block:
    page: Path
    line: int
    language: str
    title: str | None
    text: str
    reason: str  # why it is not run, or ""

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for m in FENCE.finditer(text):
        before = text[: m.start()].rstrip("\n").rpartition("\n")[2]
        reason = re.fullmatch(r" *<!-- not run: (.+) -->", before)
        code = re.sub(f"^{m['indent']}", "", m["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, m.start()) + 1
        found.append(Block(page, line, m["language"], m["title"], code, reason[1] if reason else ""))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
CODE = [block for block in ALL if block.language in RUN]


def small() -> dict[str, Any]:
    """What README's blocks take for granted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    inputs = (torch.randn(8, 16),)
    return {"model": model, "example_inputs": inputs, "inputs": inputs}


def run_python(block: Block, names: dict[str, Any]) -> None:
    # the line numbers of the page, so that an error points there
    code = compile("\n" * block.line + block.text, str(block.page), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)


def run_shell(block: Block) -> None:
    """Forge's own command line runs in this process, where torch is imported already; the rest in one of its own."""
    for command in re.sub(r"\\\n", " ", block.text).splitlines():
        words = shlex.split(command, comments=True)
        if not words:
            continue
        if words[0] == "forge-ugc" or words[:3] == ["python", "-m", "forge_ugc"]:
            words = words[1:] if words[0] == "forge-ugc" else words[3:]
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                try:
                    status: Any = main(words)
                except SystemExit as exit_:  # --help
                    status = exit_.code
            assert not status, f"{block.name}: exit status {status} of {command}"
            continue
        assert words[0] in ("python", "pytest"), f"{block.name}: how is {command!r} to be run?"
        words = [sys.executable, *([] if words[0] == "python" else ["-m", "pytest"]), *words[1:]]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        if words[2] == "pytest" and not _installed_plugin():
            words[3:3] = ["-p", "pytest_forge_ugc"]
        done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, f"{block.name}: {command}\n{done.stdout}{done.stderr}"


def _installed_plugin() -> bool:
    from importlib.metadata import entry_points

    return "forge_ugc" in entry_points(group="pytest11").names


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [block for block in blocks(page) if block.language in RUN and not block.reason]
    if not mine:
        pytest.skip("no code")
    if "software_npu()" in page.read_text():
        ze_client.require_software_npu()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, Any] = {"__name__": "__page__", "forge_ugc": forge_ugc}
    if page.name == "README.md":
        names.update(small())
    torch._dynamo.reset()
    state, grad = torch.get_rng_state(), torch.is_grad_enabled()
    try:
        for block in mine:
            if block.title:
                (tmp_path / block.title).write_text(block.text)
            elif block.language == "sh":
                run_shell(block)
            else:
                run_python(block, names)
    finally:
        torch._dynamo.reset()
        torch.set_rng_state(state)
    assert torch.is_grad_enabled() == grad


@pytest.mark.parametrize("block", [b for b in CODE if b.reason], ids=lambda b: b.name)
def test_blocks_that_are_not_run(block: Block) -> None:
    """The list of them, with why."""
    pytest.skip(f"not run: {block.reason}")


def test_every_block_is_known() -> None:
    """No fence is overlooked: it is run, marked, or no code. README has no code that is only indented."""
    assert len([b for b in CODE if not b.reason]) > 30
    wrong = [f"{b.name}: {b.language!r}" for b in ALL if b.language not in RUN | PROSE]
    for page in PAGES:
        text = page.read_text()
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks(page)), page
        bare = FENCE.sub("", text)
        wrong += [f"{page.name}: {line}" for line in re.findall(r"^(?: {4}|\t)\S.*", bare, re.MULTILINE)
                  if re.match(r"\s+(?:make|pip|python|forge-ugc|build/|import|from)\b", line)]  # fmt: skip
    assert not wrong, wrong


# --- the pages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(folder / "doctrees"), "docs",
         str(folder / "html")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def public() -> list[str]:
    """Every public name, and the public methods and properties of public classes."""
    import forge_ugc.dynamo
    import forge_ugc.integrations.transformers
    import forge_ugc.testing

    names = []
    for module in (forge_ugc, forge_ugc.testing, forge_ugc.dynamo, forge_ugc.integrations.transformers):
        for name in module.__all__:
            value = getattr(module, name)
            if name == "testing" or (name == "last_reports" and module is forge_ugc.dynamo):
                continue  # a module; known by its shorter name
            names.append(f"{module.__name__}.{name}")
            if isinstance(value, type):
                known = {k: v for base in value.__mro__[:-1] if base.__module__.startswith("forge_ugc")
                         for k, v in vars(base).items()}  # fmt: skip
                known = {k: v for k, v in known.items() if callable(v) or isinstance(v, property)}
                names += [f"{module.__name__}.{name}.{k}" for k in known if not k.startswith("_")]
    return names


def test_every_public_name_is_on_a_page(site: Path) -> None:
    text = "\n".join(page.read_text() for page in site.rglob("*.html"))
    names = public()
    assert len(names) > 50
    missing = [n for n in names if f'id="{n}"' not in text and f">{n}<" not in text and not n.endswith("__version__")]
    assert not missing, missing
    assert "forge_ugc.__version__" in text


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not re.search(r"<(?:script|img|iframe)[^>]+src=\"(?:https?:)?//", text), page
        assert not re.search(r"<link[^>]+rel=\"stylesheet\"[^>]+href=\"(?:https?:)?//", text), page
    assert "csrc/graph" in (site / "how-it-works.html").read_text()


def test_reference_documents_each_argument() -> None:
    """Every argument of a public function is named in its docstring."""
    import inspect

    from forge_ugc import testing
    from forge_ugc.integrations.transformers import compile_config

    functions = [forge_ugc.compile, forge_ugc.load, forge_ugc.bisect_passes, testing.assert_fidelity,
                 testing.software_npu, compile_config]  # fmt: skip
    for function in functions:
        text = inspect.getdoc(function) or ""
        for name in inspect.signature(function).parameters:
            assert re.search(rf"\b{name}\b[^:\n]*:|`{name}`|\b{name}\b", text), f"{function.__name__}: {name}"


def test_readme_rows_are_backed_by_tests_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    table = text[text.index("## What there is") :].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if "not there yet" not in line]
    assert len(rows) >= 9
    for what, *_, shown in rows:
        files = re.findall(r"`(?:tests/|benchmarks/)?([\w*.]+\.py)`", shown)
        assert files, what
        for name in files:
            assert list((ROOT / "tests").glob(name)) or list((ROOT / "benchmarks").glob(name)), f"{what}: {name}"
