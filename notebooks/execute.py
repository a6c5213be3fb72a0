"""Runs the notebooks from a clean kernel and writes them with their outputs.

    python notebooks/execute.py                      # all of them, in place, and docs/images
    python notebooks/execute.py quickstart           # one of them
    python notebooks/execute.py quickstart --output-dir outputs/notebooks
    python notebooks/execute.py --badges             # only their links, after REPOSITORY is set

What differs from machine to machine is left out: progress bars and warnings (all of stderr), the
kernel's name and times. A picture that the documentation shows, an output of a cell with the tag
`image=NAME`, is written to docs/images/NAME.png, unless the notebooks go elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
NAMES = ("quickstart", "grpo", "interruption", "sleep_wake", "real_model")
IMAGE_TAG = "image="

REPOSITORY = ""
"""The public GitHub repository, "owner/name": Colab opens the notebooks from its branch main."""

_BADGE = "[![Open in Colab]"
_BY_HAND = "**On Colab**: *File*, *Upload notebook* takes this file."

COLAB_KEYS = ("accelerator", "colab")
"""Metadata by which a notebook asks Colab for a GPU."""

CELL_TIMEOUT_S = 600


class ThisPythonsKernel(AsyncKernelManager):
    """Starts the kernel of the interpreter that runs this, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        """How to start it."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


def read(path: Path) -> NotebookNode:
    """Returns a notebook; raises nbformat.ValidationError for what is none."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


async def execute(notebook: NotebookNode, folder: Path) -> None:
    """Runs all cells in `folder`, in a new kernel, and puts their outputs into the notebook.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised; it has the traceback.
        nbclient.exceptions.CellTimeoutError: A cell took longer than `CELL_TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory() as sockets:
        # In the file system, since another process could take a port, or listen to it.
        manager = ThisPythonsKernel(transport="ipc", ip=str(Path(sockets) / "kernel"))
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            await client.async_execute()
        finally:
            if manager.has_kernel:
                await manager.shutdown_kernel(now=True)


def colab_line(name: str, repository: str = REPOSITORY) -> str:
    """How to open a notebook in Colab: a badge, or without a public repository how to by hand."""
    if not repository:
        return _BY_HAND
    colab = "https://colab.research.google.com"
    address = f"{colab}/github/{repository}/blob/main/notebooks/{name}.ipynb"
    return f"{_BADGE}({colab}/assets/colab-badge.svg)]({address})"


def set_colab_line(notebook: NotebookNode, name: str, repository: str = REPOSITORY) -> None:
    """Writes that line into the notebook's first cell, in place of the one that is there.

    Raises:
        ValueError: The cell has no such line.
    """
    lines = notebook.cells[0].source.splitlines()
    (place,) = [i for i, line in enumerate(lines) if line.startswith((_BADGE, _BY_HAND))]
    lines[place] = colab_line(name, repository)
    notebook.cells[0].source = "\n".join(lines)


def strip(notebook: NotebookNode) -> list[str]:
    """Takes out what differs from machine to machine, and shrinks pictures.

    Returns:
        The lines of stderr.
    """
    messages: list[str] = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode({"tags": tags} if tags else {})
        if cell.cell_type != "code":
            continue
        is_message = [output.get("name") == "stderr" for output in cell.outputs]
        for output, is_stderr in zip(cell.outputs, is_message, strict=True):
            if is_stderr:
                messages += output.text.splitlines()
        cell.outputs = [
            output
            for output, is_stderr in zip(cell.outputs, is_message, strict=True)
            if not is_stderr
        ]
        for output in cell.outputs:
            output.get("metadata", {}).clear()
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = base64.b64encode(smaller(data["image/png"])).decode("ascii")
    asked_of_colab = {key: notebook.metadata[key] for key in COLAB_KEYS if key in notebook.metadata}
    notebook.metadata = NotebookNode(
        {
            **asked_of_colab,
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return messages


def smaller(png_base64: str) -> bytes:
    """Returns a PNG with a palette of 256 colours, which takes a third of the bytes."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png_base64))) as image:
        image.convert("RGB").quantize(256).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def pictures(notebook: NotebookNode) -> Iterator[tuple[str | None, bytes]]:
    """Yields the name that the documentation has for each picture, or None, and the PNG."""
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        names = [tag.removeprefix(IMAGE_TAG) for tag in tags if tag.startswith(IMAGE_TAG)]
        for output in cell.get("outputs", []):
            png = output.get("data", {}).get("image/png")
            if png is not None:
                yield (names[0] if names else None), base64.b64decode(png)


def search_path(environ: Mapping[str, str]) -> str:
    """PYTHONPATH with which a kernel imports the packages of this checkout."""
    folders = [str(ROOT), str(ROOT / "engine"), environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, folders))


def main(argv: list[str] | None = None) -> int:
    """Runs the notebooks that the command line names."""
    parser = argparse.ArgumentParser(description="Run the notebooks from a clean kernel.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; all if none is given")
    parser.add_argument(
        "--badges", action="store_true", help="run nothing, write the links that open Colab"
    )
    parser.add_argument("--output-dir", type=Path, default=FOLDER, help="default: in place")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.names) - set(NAMES))
    if unknown:
        parser.error(f"names must be of {', '.join(NAMES)}, got {', '.join(unknown)}")
    os.environ["PYTHONPATH"] = search_path(os.environ)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for name in args.names or NAMES:
        notebook = read(FOLDER / f"{name}.ipynb")
        set_colab_line(notebook, name)
        if args.badges:
            nbformat.write(notebook, args.output_dir / f"{name}.ipynb")
            continue
        start = time.perf_counter()
        asyncio.run(execute(notebook, FOLDER))
        seconds = time.perf_counter() - start
        for line in strip(notebook):
            print(line, file=sys.stderr)
        nbformat.write(notebook, args.output_dir / f"{name}.ipynb")
        if args.output_dir.resolve() == FOLDER:
            for image, png in pictures(notebook):
                if image is not None:
                    (ROOT / "docs/images" / f"{image}.png").write_bytes(png)
        print(f"{name}: {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
