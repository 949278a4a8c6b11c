"""A CUDA device for machines without one, to find what would break or wait on a real one.

    python -m tests.emulated_gpu subquad train RECIPE --out RUN
    python -m tests.emulated_gpu pytest tests/gpu -m gpu

runs a module with it. torch.cuda.is_available() is True there, and tensors that are moved to "cuda" say that they are
on cuda:0. They hold their numbers on the CPU, so that results are real. What mixes them with tensors on the CPU fails
as on a GPU; launches of kernels, synchronisations and copies are counted (`counts.py`); the device has random numbers
of its own and knows how much of its memory is in use. Triton's kernels run in Triton's interpreter.

It is no measure of time, it has one stream on which everything has happened at once, and it has no NCCL and no
torch.compile. With the variable SUBQUAD_EMULATED_GPU_REPORT=FILE the counts of the program are written to a file.
"""
