"""What every op gives for fixed inputs; as a program, in a process of its own that may compile for another
processor.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from surefoot.kernels.base import Observed, Past, SampleRows, Slots
from surefoot.kernels.cpu.launch import Launcher
from surefoot.kernels.cpu.ops import CpuOps
from surefoot.kernels.layout import FULL, INT4, INT8, K8V4, BlockLayout
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
        packed = ops.prepare_linear(weight)
        outputs[kind] = ops.linear(x, packed)
        outputs[f"embed {kind}"] = ops.embed(torch.arange(39, -1, -3), packed)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        outputs[f"dense {dtype}"] = ops.linear(x, ops.prepare_linear(dense.to(dtype)))
    outputs["rms_norm"] = ops.rms_norm(x, dense[0], 1e-5)
    normed = x.view(13, 2, 48).clone()
    ops.norm_heads(normed, dense[0, :48], 1e-5)
    outputs["norm_heads"] = normed
    for dtype in (torch.bfloat16, torch.float16):
        kept = [torch.empty(13, 2, 48, dtype=dtype) for _ in range(2)]
        ops.keep(x.view(13, 2, 48).clone(), (1e-5 * x).view(13, 2, 48), *kept)
        outputs[f"keep {dtype}"] = torch.cat(kept)
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
    outputs |= _format_outputs(ops)
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


def _format_outputs(ops: CpuOps) -> dict[str, Tensor]:
    """Bytes of every cache format, and what is read from them."""
    layout = BlockLayout(num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    cache, token = torch.zeros(1, 24, layout.block_bytes, dtype=torch.uint8), torch.arange(100)
    k, v = (
        ops.rotate(torch.randn(200, 2, 64)).view(2, 1, 100, 2, 64) * torch.logspace(-6, 3, 100)[:, None, None]
    )
    slots, pasts = {}, []
    for i, kind in enumerate((FULL, INT8, K8V4, INT4)):
        first, capacity = (0, 7, 11, 14)[i], layout.capacity(kind)
        blocks, place = (first + token // capacity).int(), (token % capacity).int()
        ops.commit(cache, layout, k, v, blocks, place, kind)
        slots[kind] = Slots(blocks=blocks, slots=place, format=kind)
        table = torch.arange(first, first + 8, dtype=torch.int32)[None]
        pasts.append(Past(block_table=table, lengths=torch.tensor([100], dtype=torch.int32), format=kind))
    lower = Slots(blocks=slots[INT4].blocks + 6, slots=slots[INT4].slots, format=INT4)
    ops.demote(cache, layout, slots[INT8], lower)
    q, cu_rows = torch.randn(3, 6, 64), torch.tensor([0, 3], dtype=torch.int32)
    out, lse = ops.past_attention(q, cu_rows, cache[0], layout, pasts, 0.01)
    observed = Observed(rows=torch.tensor([2], dtype=torch.int32), lse=lse)
    mass = [ops.past_mass(q, cu_rows, cache[0], layout, p, 0.01, observed).flatten() for p in pasts]
    present = ops.present_mass(q, q[:, :2], cu_rows, 0.01, observed)
    return {"cache": cache, "mixed past": out, "mass": torch.cat(mass), "present mass": present}


if __name__ == "__main__":
    op_set = CpuOps(Launcher(Path(sys.argv[1]), 1))
    torch.save(form_outputs(op_set), sys.argv[2])
    sys.stdout.write(op_set.name)
