"""Compile every kernel for a GPU that need not be there: Triton's interpreter accepts what its compiler refuses.

``python -m tests.kernels.compile_all ARCHITECTURE`` prints the kernels' names; a kernel that does not compile is an
exception. The warm-up calls of the kernels' contracts are made, and each is compiled in place of being launched.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoengine.kernels.contract import KERNELS, contract_of_function, warmup_calls

TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64",
         torch.int64: "*i64", torch.int32: "*i32"}  # fmt: skip
OPTIONS = ("num_warps", "num_stages")


def type_of(value) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype][1:]}{value.block_shape}>"
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def recorded_calls(run) -> list[tuple[JITFunction, dict, dict]]:
    """(kernel, arguments, options) of all kernels that ``run`` launches."""
    calls = []

    def note(kernel, *args, grid, warmup, **more):
        more.pop("launch_pdl", None)
        options = {name: more.pop(name) for name in OPTIONS if name in more}
        calls.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | more, options))

    original, JITFunction.run = JITFunction.run, note
    try:
        run()
    finally:
        JITFunction.run = original
    return calls


def compiled(kernel: JITFunction, arguments: dict, options: dict, architecture: int) -> str:
    constants = {p.name for p in kernel.params if p.is_constexpr}
    values = {name: arguments[name] for name in constants}
    if "OVERLAP" in values:
        values["OVERLAP"] = architecture >= 90
    if "ON_GPU" in values:
        values["ON_GPU"] = True
    signature = {name: "constexpr" if name in constants else type_of(arguments[name]) for name in kernel.arg_names}
    made = triton.compile(ASTSource(kernel, signature, constexprs=values), target=GPUTarget("cuda", architecture, 32),
                          options=options)  # fmt: skip
    if kernel.__name__ == "_best_of_tile" and str(0x7F800000) not in made.asm["ptx"]:
        raise RuntimeError("_best_of_tile: no comparison of bits is left; with floats the compiler may assume no NaN")
    if values.get("OVERLAP"):
        early = before_waiting(made.asm["ptx"])
        if "ret" in early:
            raise RuntimeError(f"{kernel.__name__}: some of its programs end without waiting for the kernel before")
        if any(instruction.startswith(("st.global", "cp.async.bulk", "atom", "red.")) for instruction in early):
            raise RuntimeError(f"{kernel.__name__}: it stores, or copies tiles, before it waits")
        contract = contract_of_function()[kernel.__name__]
        if contract.prefetches and "prefetch.global.L2" not in early:
            raise RuntimeError(f"{kernel.__name__}: it asks for its weights too late")
    return kernel.__name__


def before_waiting(ptx: str) -> set[str]:
    """Instructions on the ways from a kernel's first one to griddepcontrol.wait; with "ret" if one leaves it out.

    A kernel that ends before the one before it has ended lets the one after it begin too early.
    """
    lines = [line.split("//")[0].replace(";", " ").split() for line in ptx[ptx.index(".entry") :].splitlines()]
    labels = {line[0][:-1]: at for at, line in enumerate(lines) if line and line[0].endswith(":")}
    seen, ways, found = set(), [0], set()
    while ways:
        at = ways.pop()
        seen.add(at)
        condition, *rest = lines[at] or [""]
        instruction, *operands = rest if condition.startswith("@") else lines[at] or [""]
        found.add(instruction)
        if instruction in ("ret", "griddepcontrol.wait"):
            continue
        ahead = [at + 1]
        if instruction.startswith("bra"):
            ahead = [labels[operands[-1]], *([at + 1] if condition.startswith("@") else [])]
        ways += set(ahead) - seen
    return found


def launches(name: str, dtype: torch.dtype) -> list:
    from nanoengine.model.config import NAMED_CONFIGS
    from nanoengine.model.decoder import Decoder
    from nanoengine.model.fused import fuse, model_tensors

    model = Decoder(NAMED_CONFIGS[name], 64).to(dtype)
    fuse(model)
    calls = warmup_calls(KERNELS, model_tensors(model, 16))
    return recorded_calls(lambda: [call() for call in calls])


def main(architecture: int) -> None:
    kinds = [("tiny-qwen3", torch.float32), ("tiny-llama", torch.float16)]
    kinds += [("tiny-qwen2", torch.float16), ("smollm2-135m", torch.bfloat16)]
    calls = [call for kind in kinds if architecture >= 80 or kind[1] != torch.bfloat16 for call in launches(*kind)]
    contracts = contract_of_function()
    calls = [call for call in calls if architecture == 90 or not contracts[call[0].__name__].hopper]
    with ThreadPoolExecutor(2) as pool:
        print(*sorted(set(pool.map(lambda call: compiled(*call, architecture), calls))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
