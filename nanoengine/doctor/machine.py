"""Checks of the machine: Python, torch, GPU, kernels."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

from nanoengine.doctor.check import PYTHON, Check, is_older, pip_install, required, version_of

CPU_TORCH = "--index-url https://download.pytorch.org/whl/cpu"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def python() -> Check:
    detail = f"{platform.python_version()}, {sys.executable}"
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return Check("ok", f"{detail}; PYTHONDONTWRITEBYTECODE is set: importing torch is slow each time",
                     "unset PYTHONDONTWRITEBYTECODE")  # fmt: skip
    return Check("ok", detail)


def machine() -> Check:
    from nanoengine.bench.machine import cpu_model

    detail = f"{platform.system()} {platform.machine()}, {cpu_model()}, {os.cpu_count()} cores"
    import psutil

    memory = psutil.virtual_memory()
    detail += f", {memory.total / 2**30:.0f} GiB memory, {memory.available / 2**30:.1f} free"
    if memory.available < 2 * 2**30:
        return Check("problem", f"{detail}: 2 GiB are needed", "close other programs and notebooks, then try again")
    return Check("ok", detail)


def torch() -> Check:
    try:
        import torch
    except ModuleNotFoundError as error:
        options = CPU_TORCH if sys.platform == "linux" and not shutil.which("nvidia-smi") else ""
        return Check("missing", f"{error}", pip_install(error.name or "torch", options=options))
    build = "CPU build" if torch.version.cuda is None else f"build for CUDA {torch.version.cuda}"
    detail = f"{torch.__version__}, {build}, {_count(torch.get_num_threads(), 'thread')}"
    floor = required().get("torch", "0")
    if is_older(torch.__version__, floor):
        return Check("problem", f"{detail}: {floor} or newer is needed", pip_install("torch", options="--upgrade"))
    if not int(torch.ones(2, 2).matmul(torch.ones(2, 2)).sum()) == 8:
        return Check("problem", f"{detail}: it multiplies wrongly", pip_install("torch", options="--force-reinstall"))
    return Check("ok", detail)


def device() -> Check:
    from nanoengine.worker.device import pick_device, pick_dtype

    chosen = pick_device("auto")
    return Check("ok", f"auto takes {chosen} with {str(pick_dtype('auto', 'bfloat16', chosen)).removeprefix('torch.')}")


def gpu() -> Check:
    seen = _nvidia_smi()
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        low = [i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(i) < (7, 5)]
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        if low:
            return Check("problem", f"{names}: older than Turing", "export CUDA_VISIBLE_DEVICES=  # use the CPU")
        return Check("ok", seen or names)
    if not seen:
        return Check("missing", "no NVIDIA GPU or driver seen", "nothing: the course runs on the CPU")
    if torch is None or torch.version.cuda is None:
        return Check("problem", f"{seen}: this torch cannot use it", pip_install("torch", options="--force-reinstall"))
    return Check("problem", f"{seen}: the driver is too old for CUDA {torch.version.cuda}, or the GPU is hidden",
                 "update the driver (https://www.nvidia.com/drivers), or unset CUDA_VISIBLE_DEVICES")  # fmt: skip


def _nvidia_smi() -> str:
    """Name, driver and memory of the GPUs, or "" where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace",
                            stdin=subprocess.DEVNULL, timeout=10)  # fmt: skip
    return "; ".join(line.strip() for line in result.stdout.splitlines()) if result.returncode == 0 else ""


def parallel() -> Check:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Check("missing", "this torch has no torch.distributed: tensor_parallel_size must be 1",
                     "nothing: one device does without")  # fmt: skip
    nccl = dist.is_nccl_available() and torch.cuda.is_available()
    over = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, " if nccl else ""
    return Check("ok", f"{over}gloo; {_count(torch.cuda.device_count(), 'GPU')}, {_count(os.cpu_count(), 'core')}")


def attention() -> Check:
    from nanoengine.attention import choose_backend
    from nanoengine.config import BACKENDS
    from nanoengine.worker.device import pick_device

    here, works, others = pick_device("auto"), [], []
    for name in BACKENDS:
        try:
            works.append(choose_backend(name, here).name)
        except (ValueError, ImportError):
            others.append(name)
    status = "ok" if "torch" in works else "problem"
    said = [f"{name} (chosen by auto)" if name == works[0] else name for name in dict.fromkeys(works)]
    detail = ", ".join(said) + (f"; not here: {', '.join(others)}" if others else "")
    return Check(status, detail, "" if status == "ok" else "make setup")


def triton() -> Check:
    if sys.platform != "linux":
        return Check("missing", "exists for Linux only", "nothing: the CPU course does without")
    try:
        return Check("ok", version_of("triton"))
    except ModuleNotFoundError:
        return Check("missing", "needed for our kernels only", f'{PYTHON} -m pip install "triton>=3.6"')


def flash_attn() -> Check:
    try:
        return Check("ok", version_of("flash_attn"))
    except ModuleNotFoundError:
        if not _nvidia_smi():
            return Check("missing", "needs an NVIDIA GPU", "nothing: the CPU course does without")
        return Check("missing", "faster attention on NVIDIA GPUs",
                     f'{PYTHON} -m pip install --no-build-isolation "flash-attn>=2.8"')  # fmt: skip
