"""`lowp doctor`: what works here, a line each, and what to do where it does not."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer

from lowp.cli.columns import terminal_width
from lowp.cli.output import JSON_HELP, examples, print_json

EXAMPLES = examples(("lowp doctor", "what works here"), ("lowp doctor --json", "for a bug report"))

OK, LESS, BROKEN = "ok", "less", "broken"
COLOURS = {OK: "green", LESS: "yellow", BROKEN: "red"}
EXTRAS = {  # an extra of lowp, and a module of each package in it
    "report": ("plotly", "jinja2"),
    "parquet": ("pyarrow",),
    "train": ("torchvision", "tensorboard"),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "lightning": ("lightning",),
    "ray": ("ray",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
}
SECONDS = 20  # that two ranks may take to meet and to measure
MESSAGE, ROUNDS = 1 << 24, 200  # bytes of a large message; small ones

_OTHER_RANK = """
import sys
from lowp.cli.doctor import measure_link
measure_link(sys.argv[1], 1)
"""


@dataclass(frozen=True)
class Diagnosis:
    """`state`: ok; less: it works, but slower or without something; broken: something that lowp needs does not work."""

    what: str
    state: str
    text: str
    advice: str = ""


def diagnose(
    json: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
) -> None:
    """Say what works on this machine, and what to do where something does not.

    Exit codes: 0, everything that lowp needs works; 1, something does not.
    """
    width = terminal_width()
    findings: list[Diagnosis] = []
    for finding in look():
        findings.append(finding)
        if not json:
            _print(finding, width)
    broken = [finding.what for finding in findings if finding.state == BROKEN]
    if json:
        print_json({"works": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        slower = sum(finding.state == LESS for finding in findings)
        more = f" {slower} of {len(findings)} could be better." if slower else ""
        typer.echo(f"\n{'Not everything works: ' + ', '.join(broken) if broken else 'lowp works here'}.{more}")
    raise typer.Exit(1 if broken else 0)


def _print(finding: Diagnosis, width: int) -> None:
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    state = f"{finding.state:<6}"
    mark = typer.style(state, fg=COLOURS[finding.state]) if coloured else state
    text = f"{finding.text}. {finding.advice[:1].upper()}{finding.advice[1:]}" if finding.advice else finding.text
    lines = wrap(text, max(width - 21, 20)) or [""]
    typer.echo("\n".join((f"{finding.what:<12}  {mark} {lines[0]}", *(" " * 21 + line for line in lines[1:]))))


def look() -> Iterator[Diagnosis]:
    """One finding after the other. A second rank starts at once: to import torch takes it a while."""
    with tempfile.TemporaryDirectory(prefix="lowp-doctor-") as folder:
        store = str(Path(folder) / "store")
        other = _start_rank(store) if find_spec("torch") is not None else None
        try:
            yield from _look(store, other)
        finally:
            if other is not None:
                other.kill()
                other.communicate()


def _look(store: str, other: "subprocess.Popen[str] | None") -> Iterator[Diagnosis]:
    yield _python()
    yield (first := _torch())
    if first.state == BROKEN:
        return
    checks: tuple[Callable[[], Diagnosis], ...] = (_cores, _compiler, _kernels, _processor, _triton, _gpu, _nccl)
    for check in checks:
        yield check()
    assert other is not None
    yield _gloo(store, other)
    for name, modules in EXTRAS.items():
        missing = [module for module in modules if find_spec(module) is None]
        if missing:
            yield Diagnosis(name, OK, f"not installed (optional): pip install 'lowp[{name}]'")
        else:
            yield Diagnosis(name, OK, ", ".join(f"{module} {_version(module)}" for module in modules))


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _python() -> Diagnosis:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() not in ("Linux", "Darwin"):
        return Diagnosis("Python", LESS, text, "lowp is tested on Linux; ranks and locks may not work here")
    return Diagnosis("Python", OK, text)


def _torch() -> Diagnosis:
    try:
        import torch

        from lowp import compat
        from lowp.version import __version__
    except ImportError as error:
        return Diagnosis("torch", BROKEN, " ".join(str(error).split()), "pip install 'torch>=2.11'")
    return Diagnosis("torch", OK, f"{torch.__version__}, lowp {__version__} (seen with torch {compat.SEEN})")


def _cores() -> Diagnosis:
    import torch

    from lowp.machine import usable_cores

    asked = os.environ.get("OMP_NUM_THREADS")
    text = f"{usable_cores()} of {os.cpu_count()} usable, torch has {torch.get_num_threads()} threads"
    return Diagnosis("cores", OK, text + (f" (OMP_NUM_THREADS={asked})" if asked else ""))


def _compiler() -> Diagnosis:
    from lowp.tensor.lists.cpp import compiler

    try:
        name = compiler()
        said = subprocess.run(
            [name, "--version"], capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        advice = "install g++ (apt install g++) or clang++ (xcode-select --install): without one, CPUs round many times slower"
        return Diagnosis("C++ compiler", LESS, " ".join(str(error).split()), advice)
    return Diagnosis("C++ compiler", OK, (said.splitlines() or [name])[0])


def _kernels() -> Diagnosis:
    """Can they be compiled, kept and loaded?"""
    from lowp.tensor.lists.cache import cache_folder, check_cache

    folder = Path(cache_folder())
    try:
        check_cache()
    except OSError as error:
        return Diagnosis("kernel cache", LESS, " ".join(str(error).split()), "set LOWP_CACHE to a folder of your own")
    files = [file for file in folder.iterdir() if file.is_file()]
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    free = shutil.disk_usage(folder).free / 1e6
    kernels = sum(file.suffix == ".so" for file in files)
    text = f"{folder}: {kernels} kernels, {megabytes:.1f} MB"
    if free < 50:
        return Diagnosis("kernel cache", LESS, f"{text}; {free:.0f} MB are free on its disk", "set LOWP_CACHE to another disk")
    return Diagnosis("kernel cache", OK, text)


def _processor() -> Diagnosis:
    from lowp.processor import BELOW_AMX, amx_is_broken
    from lowp.training.environment import processor_name

    name = processor_name()
    if amx_is_broken():
        setting = os.environ.get("ONEDNN_MAX_CPU_ISA")
        text = f"{name}; it announces AMX, which does not work in this virtual machine: ONEDNN_MAX_CPU_ISA={setting}"
        advice = f"set ONEDNN_MAX_CPU_ISA={BELOW_AMX} wherever torch runs without lowp: 16-bit products end the process"
        return Diagnosis("processor", LESS, text, advice)
    return Diagnosis("processor", OK, name)


def _triton() -> Diagnosis:
    import torch

    if find_spec("triton") is not None:
        return Diagnosis("Triton", OK, _version("triton"))
    if torch.cuda.is_available():
        return Diagnosis("Triton", LESS, "not installed", "pip install triton: without it the GPU rounds by plain operations")
    return Diagnosis("Triton", OK, "not installed, and without a GPU not needed")


def _gpu() -> Diagnosis:
    import torch

    if torch.cuda.is_available():
        found = []
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            found.append(f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}")
        return Diagnosis("GPU", OK, "; ".join(found))
    if torch.backends.mps.is_available():
        return Diagnosis("GPU", OK, "Apple's (MPS): tensors are rounded there by plain operations; lowp train uses the CPU")
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return Diagnosis("GPU", LESS, f"torch {torch.__version__} is built without CUDA", "install a CUDA build: pytorch.org")
    return Diagnosis("GPU", OK, "none: everything runs on the CPU")


def _nccl() -> Diagnosis:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return Diagnosis("NCCL", OK, "not needed without a GPU")
    if not dist.is_available() or not dist.is_nccl_available():
        return Diagnosis("NCCL", LESS, "torch is built without it", "ranks on GPUs cannot exchange: install torch with CUDA")
    return Diagnosis("NCCL", OK, ".".join(map(str, torch.cuda.nccl.version())))


def _gloo(store: str, other: "subprocess.Popen[str]") -> Diagnosis:
    """Two ranks on this machine: do they meet, and how fast is the link between them?"""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Diagnosis("two ranks", BROKEN, "torch is built without gloo", "install another build of torch: pytorch.org")
    try:
        latency, bandwidth = measure_link(store, 0)
    except RuntimeError as error:  # a timeout, or the other has gone
        said = other.stderr.read() if other.poll() is not None and other.stderr else ""
        why = (said.strip() or str(error)).splitlines()[-1]
        advice = "check that processes may connect to 127.0.0.1: a firewall or a sandbox may forbid it"
        return Diagnosis("two ranks", BROKEN, f"gloo: {' '.join(why.split())}", advice)
    text = f"gloo over loopback: {latency * 1e6:.0f} us a message, {bandwidth * 8 / 1e9:.1f} Gbit/s"
    return Diagnosis("two ranks", OK, text)


def _start_rank(store: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _OTHER_RANK, store]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    )


def measure_link(store: str, rank: int) -> tuple[float, float]:
    """Seconds of a small message one way, and bytes a second of large ones, between two ranks."""
    import torch
    import torch.distributed as dist

    from lowp.training.rendezvous import INTERFACES, LOOPBACK

    os.environ.update(dict.fromkeys(INTERFACES, LOOPBACK))
    shared: Any = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
    try:
        latency = _round_trip(torch.zeros(1), rank, ROUNDS) / 2
        seconds = _round_trip(torch.zeros(MESSAGE // 4), rank, 4) / 2
    finally:
        dist.destroy_process_group()
    return latency, MESSAGE / seconds


def _round_trip(message: Any, rank: int, rounds: int) -> float:
    """The seconds of one, after a first that opens the connection."""
    import torch.distributed as dist

    start = 0.0
    for number in range(rounds + 1):
        if number == 1:
            start = time.perf_counter()
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
    return (time.perf_counter() - start) / rounds
