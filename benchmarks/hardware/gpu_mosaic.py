"""Decode attention by Pallas' Triton and by its Mosaic GPU, as compilers tell; nothing is run.

    python benchmarks/hardware/gpu_mosaic.py                      # some minutes, without a GPU
    python benchmarks/hardware/gpu_mosaic.py --python ENV/bin/python

Needs JAX's CUDA plugin, and CUDA's `ptxas` in PATH; where `nvdisasm` is too, instructions are
counted. Both kernels are compiled for an H100. `--python` names interpreters with other versions of
JAX, which are asked what GPU kernels they lower.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.hardware import gpu_lowerings, mosaic_attention
from benchmarks.hardware.gpu_lowerings import Case, lower_for_h100, shape, whole
from benchmarks.lib.reporting import ROOT, make_parser, output_dir, write_results
from sgljax_engine.kernels.gpu import paged_attention

ROWS, MAX_KEYS, NUM_PAGES_OF_KEYS = 128, 1024, 131_072
SCORES = gpu_lowerings.SCORES
SM_REGISTERS, SM_SHARED_BYTES, SM_THREADS, RESERVED_BYTES = 65_536, 233_472, 2048, 1024
"""What a multiprocessor of an H100 has; each block takes some shared memory beside its own."""

STEP = mosaic_attention.DEFAULT_STEPS
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)
_END = re.compile(r"\*/\s+EXIT\b")
_BRANCH = re.compile(r"\bBRA `\((\.L_x_\d+)\)")


@dataclasses.dataclass(frozen=True)
class Work:
    """A decode step of 128 rows of up to 1,024 keys."""

    title: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int

    def triton_keys(self) -> int:
        """Keys of a step of the Triton kernel."""
        q, k, *_ = self.case("Triton").shapes
        size = (ROWS, 1, *q.shape[1:])
        return paged_attention.choose_tiling(size, k, MAX_KEYS // self.page_size).keys

    def case(self, kernel: str) -> Case:
        """The step by "Triton" or "Mosaic"."""
        q = shape(ROWS, self.num_heads, self.head_dim)
        num_pages = NUM_PAGES_OF_KEYS // self.page_size
        pages = shape(num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        tables = whole(ROWS, MAX_KEYS // self.page_size), whole(ROWS)

        def triton_decode(q: Any, k: Any, v: Any, table: Any, kv_lens: Any) -> Any:
            positions = kv_lens[:, None] - 1
            return paged_attention.paged_attention(
                q[:, None], k, v, table, positions, kv_lens, SCORES
            )

        def mosaic_decode(*args: Any) -> Any:
            return mosaic_attention.decode_attention(*args, scale=SCORES.scale, steps=STEP)

        call = mosaic_decode if kernel == "Mosaic" else triton_decode
        return Case(call, (q, pages, pages, *tables))


WORKS = (
    Work("Qwen3-0.6B, pages of 16", 16, 8, 128, 16),
    Work("Qwen3-0.6B, pages of 64", 16, 8, 128, 64),
    Work("Llama-3.2-1B, pages of 16", 32, 8, 64, 16),
)

WARM_UP = Work("first", 8, 8, 64, 32)
"""Compiled before the others, since the first programs of a process take longer. Mosaic compiles
equal kernels once: all heads of a kv head up to 8 have the same."""


def compile_work(work: Work, kernel: str, folder: Path) -> dict[str, Any]:
    """What the compilers say of a kernel. They write into `folder`, see `prepare_dumps`."""
    for path in folder.iterdir():
        path.unlink()
    start = sum(os.times()[:4])
    compiled = lower_for_h100(work.case(kernel)).compile()
    seconds = sum(os.times()[:4]) - start
    memory = compiled.memory_analysis()
    assert memory is not None
    name = "mosaic_decode" if kernel == "Mosaic" else "paged_attention"
    ptx = next(
        path
        for path in sorted(folder.glob("*.ptx"))
        if re.search(rf"\.entry {name}", path.read_text())
    )
    launches = _dumped(folder, "thunk_sequence.txt")
    if kernel == "Mosaic":
        log = _dumped(folder, "mlir-passes.log")
        shared = re.search(r"dynamic_shared_memory_size %c(\d+)_i32", log)
    else:
        shared = re.search(rf"{name} .*shared_memory: (\d+) bytes", launches)
    assert shared is not None
    num_threads = int(_only(re.findall(r"\.(?:req|max)ntid (\d+)", ptx.read_text())))
    found = {
        "keys": STEP.keys if kernel == "Mosaic" else work.triton_keys(),
        "compile_s": round(seconds, 2),
        "temporary_bytes": memory.temp_size_in_bytes,
        "launches": launches.count("grid: [") + launches.count("kCustomCall"),
        "threads": num_threads,
        "shared_bytes": int(shared[1]),
        "ptx_bytes": ptx.stat().st_size,
        **assemble(ptx),
    }
    return found | {"blocks": blocks_of(found)}


def _only(values: list[str]) -> str:
    (value,) = set(values)
    return value


def _dumped(folder: Path, suffix: str) -> str:
    return _only([path.read_text() for path in folder.glob(f"*{suffix}")])


def prepare_dumps(folder: Path) -> None:
    """Has XLA and Mosaic write what they compile; before JAX starts."""
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder}"
    os.environ |= {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTX": "1"}


def assemble(ptx: Path) -> dict[str, Any]:
    """Registers of a thread and spilled bytes, by `ptxas`; instructions, if there is `nvdisasm`."""
    cubin = ptx.with_suffix(".cubin")
    done = subprocess.run(
        ["ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin],
        capture_output=True,
        text=True,
        check=True,
    )
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill", done.stderr))
    registers = int(_only(re.findall(r"Used (\d+) registers", done.stderr)))
    found: dict[str, Any] = {"registers": registers, "spilled_bytes": spills}
    if shutil.which("nvdisasm") is None:
        return found
    text = subprocess.run(["nvdisasm", cubin], capture_output=True, text=True, check=True).stdout
    return found | count_instructions(text)


def count_instructions(text: str) -> dict[str, int]:
    """Instructions of a kernel, and of its loops over keys, as `nvdisasm` writes them.

    Those that the last step alone executes, behind a branch, are left out of the loop.
    """
    lines = text[text.index(".text.") :].splitlines()
    labels = {line.strip(" :"): i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    is_instruction = [bool(_INSTRUCTION.match(line)) for line in lines]
    jumps = [
        (i, labels[target[1]])
        for i, line in enumerate(lines)
        if (target := _BRANCH.search(line)) is not None
    ]

    def size(first: int, last: int) -> int:
        return sum(is_instruction[first : last + 1])

    found = {"instructions": sum(is_instruction)}
    for kind, opcode in (("multiplying", r"H?GMMA|HMMA"), ("copying", "UTMALDG")):
        # Blocks that wait stand behind EXIT and jump back: those are no loops.
        bodies = [
            (start, jump)
            for jump, start in jumps
            if start < jump and not any(map(_END.search, lines[start:jump]))
        ]
        counts = {
            (start, jump): len(re.findall(rf"\b(?:{opcode})\b", "\n".join(lines[start:jump])))
            for start, jump in bodies
        }
        most = max(counts.values(), default=0)
        if most == 0:
            continue
        start, jump = min(
            (each for each in counts if counts[each] == most), key=lambda x: x[1] - x[0]
        )
        skipped = [
            (i, end) for i, end in jumps if start < i < end < jump and size(i + 1, end - 1) > 50
        ]
        found[f"{kind}_loop"] = size(start, jump) - sum(size(i + 1, end - 1) for i, end in skipped)
    return found


def blocks_of(found: dict[str, Any]) -> int:
    """How many blocks a multiprocessor holds at once."""
    registers = -(-found["registers"] // 8) * 8 * found["threads"]
    shared = found["shared_bytes"] + RESERVED_BYTES
    return min(SM_REGISTERS // registers, SM_SHARED_BYTES // shared, SM_THREADS // found["threads"])


def ask_python(python: Path) -> dict[str, Any]:
    """What `gpu_lowerings.py` prints there."""
    path = os.pathsep.join(str(ROOT / each) for each in ("", "engine"))
    done = subprocess.run(
        [python, ROOT / "benchmarks/hardware/gpu_lowerings.py"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


_ROWS = {
    "keys of a step": "keys",
    "kernels launched": "launches",
    "registers of a thread": "registers",
    "spilled bytes": "spilled_bytes",
    "threads of a block": "threads",
    "shared memory of a block, bytes": "shared_bytes",
    "blocks that a multiprocessor holds": "blocks",
    "PTX, bytes": "ptx_bytes",
    "instructions": "instructions",
    "of the loop that multiplies": "multiplying_loop",
    "of the loop that copies, beside it": "copying_loop",
    "temporaries, bytes": "temporary_bytes",
    "lowering and compiling, CPU seconds": "compile_s",
}


def report_tables(programs: dict[str, Any], lowerings: list[dict[str, Any]]) -> list[str]:
    """The report's tables."""
    works = list(dict.fromkeys(name.rpartition(", ")[0] for name in programs))
    columns = [f"{work}, {kernel}" for work in works for kernel in ("Triton", "Mosaic")]
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for title, key in _ROWS.items():
        values = [programs[column].get(key) for column in columns]
        cells = [
            "" if x is None else f"{x:.1f}" if isinstance(x, float) else f"{x:,}" for x in values
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for each in lowerings:
        kernels = each["kernels"]
        warned: dict[str, list[str]] = {}
        for name, found in kernels.items():
            for text in found["warnings"]:
                warned.setdefault(text, []).append(name)
        refused = [name for name, found in kernels.items() if found["compiles"] is not None]
        strict = [name for name, found in kernels.items() if found["strict"] is None]
        lines += [
            "",
            f"JAX {each['jax']} compiles {len(kernels) - len(refused)} of {len(kernels)} kernels; "
            f"with DeprecationWarnings as errors it lowers {len(strict)}: {', '.join(strict)}.",
            "",
            *(f"- {len(names)} kernels: {text}" for text, names in warned.items()),
        ]
    return lines


def main(argv: list[str] | None = None) -> None:
    """Compiles, and writes the report."""
    parser = make_parser(__doc__)
    parser.add_argument("--python", nargs="*", type=Path, default=[], help="other JAX versions")
    args = parser.parse_args(argv)
    programs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare_dumps(Path(folder))
        for work in (WARM_UP, *WORKS[: 1 if args.quick else None]):
            for kernel in ("Triton", "Mosaic"):
                programs[f"{work.title}, {kernel}"] = compile_work(work, kernel, Path(folder))
    programs = {name: each for name, each in programs.items() if WARM_UP.title not in name}
    lowerings = [ask_python(python) for python in args.python]
    write_results(
        output_dir(args) / "gpu_mosaic.md",
        "Decode attention on GPUs by Triton and by Mosaic GPU, compiled",
        "benchmarks/hardware/gpu_mosaic.py",
        report_tables(programs, lowerings),
        {"programs": programs, "lowerings": lowerings},
        facts=["Compiled for an H100 (sm_90a); nothing was run"],
        device="none",
    )


if __name__ == "__main__":
    main()
