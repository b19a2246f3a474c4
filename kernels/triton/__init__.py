"""The ops as Triton kernels: one file per op. Imported only where they run (`select.py`)."""
