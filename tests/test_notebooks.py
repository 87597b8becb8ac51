"""examples/*.ipynb: each runs from top to bottom in a kernel of its own, and none is committed with outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests import ze_client

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def run(notebook: object, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "examples")}}
    )
    client.execute()


def kinds(notebook: object) -> set[str]:
    cells = notebook.cells  # type: ignore[attr-defined]
    return {kind for cell in cells if cell.cell_type == "code" for out in cell.outputs for kind in out.get("data", {})}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "software_npu" in path.read_text():
        ze_client.require_software_npu()
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    run(notebook, tmp_path, monkeypatch)
    if path.stem == "tour":
        shown = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
        assert "text/html" in kinds(notebook) and "Memory plan" in shown and "<svg" in shown


def test_at_least_two() -> None:
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_without_outputs(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_progress_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that compiles for over a second shows the phases in its output, which ends with the time it took."""
    code = (
        "import time, torch, forge_ugc\nfrom forge_ugc import progress\nprogress.DELAY_S = 0.2\n"
        "def slow(x):\n    time.sleep(0.8)\n    return x + 1\n"
        'forge_ugc.compile(slow, torch.ones(3), device="cpu"{options});'
    )
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(code.format(options=o)) for o in ("", ", progress=False")]
    run(notebook, tmp_path, monkeypatch)
    with_it, without = (cell.outputs for cell in notebook.cells)
    assert any("forge: compiled in" in out.get("data", {}).get("text/plain", "") for out in with_it), with_it
    assert not without
