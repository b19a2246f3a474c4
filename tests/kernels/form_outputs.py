"""What every op gives for fixed inputs; as a program, in a process of its own that may compile for another
processor.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from surefoot.kernels.base import Past, SampleRows
from surefoot.kernels.cpu.launch import Launcher
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.layout import BlockLayout
from surefoot.kernels.weights import BLOCK_BYTES, GroupWeight


def form_outputs(ops: CpuOps) -> dict[str, Tensor]:
    """One result per op and number format."""
    torch.manual_seed(1)
    x, dense = torch.randn(13, 96), torch.randn(40, 96)
    outputs = {}
    for kind, num_bytes in BLOCK_BYTES.items():
        data = torch.randint(0, 256, (40, 3, num_bytes), dtype=torch.uint8)
        data[..., 1] = 0x10  # scales, and codes or minimums, of moderate size
        data[..., 3] = 0x90
        weight = GroupWeight(kind=kind, data=data.flatten(1))
        outputs[kind] = ops.linear(x, ops.prepare_linear(weight))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        outputs[f"dense {dtype}"] = ops.linear(x, ops.prepare_linear(dense.to(dtype)))
    outputs["rms_norm"] = ops.rms_norm(x, dense[0], 1e-5)
    outputs["silu_mul"] = ops.silu_mul(x)
    q, k = torch.randn(13, 6, 64), torch.randn(13, 2, 64)
    outputs["rope"] = ops.rope(q, x[:, :32].contiguous().cos(), x[:, :32].contiguous().sin())
    cu_rows = torch.tensor([0, 1, 13], dtype=torch.int32)
    past = Past(
        block_table=torch.arange(40, dtype=torch.int32).view(2, 20),
        lengths=torch.tensor([300, 17], dtype=torch.int32),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layout = BlockLayout(num_kv_heads=2, head_dim=64, dtype=dtype)
        layer = torch.randn(40, layout.block_bytes // dtype.itemsize).to(dtype).view(torch.uint8)
        outputs[f"attention {dtype}"] = ops.attention(q, k, k, cu_rows, layer, layout, past, 0.125)
    index = torch.arange(13)
    rows = SampleRows(
        temperature=torch.full((13,), 0.8),
        top_k=index * 5,
        top_p=torch.full((13,), 0.9),
        min_p=torch.zeros(13),
        seed=index * 12345,
        choice=index,
        position=index,
    )
    outputs["sample"] = ops.sample(torch.randn(13, 1000) * 3, rows)
    return outputs


if __name__ == "__main__":
    op_set = CpuOps(Launcher(Path(sys.argv[1]), 1))
    torch.save(form_outputs(op_set), sys.argv[2])
    sys.stdout.write(op_set.name)
