"""The tap convolution: tiles of TIME positions by CHANNELS channels of a head, read once for each tap."""

from benchmarks.gpu.traffic import Traffic, blocks, loaded, traffic
from benchmarks.gpu.triton_launches import Launch


@traffic("conv._convolve")
def convolve(launch: Launch) -> Traffic:
    """A tile of the output reads its positions of the source shifted by every tap, which overlap.

    Logits are read twice by a program, for their log_scale and as taps; in the other direction log_scale is read.
    """
    k = launch.arguments
    batch = k.out.numel() // (k.length * k.channels)
    item, tap_item = k.source.element_size(), k.taps.element_size()
    # how far before a position its earliest and its latest input lie
    earliest, latest = (k.COUNT - 1 - k.before, -k.before) if k.TRANSPOSED else (k.before, k.before - k.COUNT + 1)
    total = 0
    for width in blocks(k.head_width, k.CHANNELS):
        for start in range(0, k.length, k.TIME):
            first, last = start - earliest, start + k.TIME - latest
            sources = max(0, min(last, k.size) - max(first, 0))
            shifts = (start - earliest + shift for shift in range(k.COUNT))
            positions = sum(max(0, min(s + k.TIME, k.size) - max(s, 0)) for s in shifts)
            if not k.OWN:
                taps = k.COUNT
            elif k.TRANSPOSED:
                taps = positions
            else:
                taps = min(k.TIME, k.length - start) * k.COUNT
            taps *= tap_item
            scales = k.log_scale.element_size() if k.SOFTMAX and k.TRANSPOSED else 0
            again = taps if k.SOFTMAX and not k.TRANSPOSED else 0
            distinct = sources * (width * item + scales) + taps
            total += loaded(distinct, positions * (width * item + scales) + taps + again)
    stored = k.out.numel() * k.out.element_size()
    return Traffic(batch * k.heads * total, stored, flops=2 * k.out.numel() * k.COUNT)


@traffic("conv._tap_products")
def tap_products(launch: Launch) -> Traffic:
    """A block of positions of a head reads its gradient, its inputs shifted by every tap, and logits, if given."""
    k = launch.arguments
    batch = k.grad.numel() // (k.length * k.channels)
    item = k.grad.element_size()
    total = 0
    for start in range(0, k.length, k.TIME):
        stop = min(start + k.TIME, k.length)
        # a gradient is read where a tap's input exists
        reads = [(max(start, k.before - tap), min(stop, k.size + k.before - tap)) for tap in range(k.COUNT)]
        reads = [(first, last) for first, last in reads if first < last]
        gradients = inputs = requested = 0
        if reads:
            gradients = max(last for _, last in reads) - min(first for first, _ in reads)
            inputs = min(stop - k.before + k.COUNT - 1, k.size) - max(start - k.before, 0)
            requested = 2 * sum(last - first for first, last in reads)
        logits = (stop - start) * k.COUNT * k.logits.element_size() if k.SOFTMAX else 0
        values = k.head_width * item
        total += loaded((gradients + inputs) * values + logits, requested * values + logits)
    stored = k.out.numel() * k.out.element_size()
    if k.SOFTMAX:
        stored += k.log_scale.numel() * k.log_scale.element_size()
    return Traffic(batch * k.heads * total, stored, flops=2 * k.grad.numel() * k.COUNT)
