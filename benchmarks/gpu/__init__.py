"""What a GPU would do, counted without one: launches, bytes and FLOPs of a mixer, and a time on paper.

    python -m benchmarks.gpu

Tensors are fake: they say that they are on a GPU and carry shapes only. Every operation that torch would launch, and
every Triton kernel of subquad, is counted (`counting.py`); a kernel's bytes and FLOPs come from a function of its own
(`traffic/`), which tests hold against the loads and stores that Triton's interpreter makes (`interpreted.py`). A stated
model of a GPU turns counts into times (`hardware.py`). No GPU has confirmed a number of it.
"""
