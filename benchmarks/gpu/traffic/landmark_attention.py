"""Landmark attention: a program has a span of one head's time, and matrices of all landmarks.

Masks are taken to hide nothing: what they hide is loaded all the same.
"""

from types import SimpleNamespace

from benchmarks.gpu.hardware import FLOAT32, FLOAT32_DOT, TENSOR
from benchmarks.gpu.traffic import Traffic, blocks, loaded, traffic
from benchmarks.gpu.triton_launches import Launch

WIDE = 4
"""Bytes of what is kept in float32."""


@traffic("landmark_attention.summarise")
def summarise(launch: Launch) -> Traffic:
    """Keys and values, and queries where these decide the weights."""
    k = launch.arguments
    small = _bytes(k, k.w) + (_bytes(k, k.f) if k.WEIGHTED else 0)
    moved = _over_spans(launch, small, 3 if k.WEIGHTED else 2, masks=2 if k.WEIGHTED else 1)
    stored = k.sums.numel() + (4 if k.WEIGHTED else 2) * launch.programs * k.count
    return Traffic(moved, stored * WIDE, _dots(launch, 1, 1 + k.WEIGHTED))


@traffic("landmark_attention.combine")
def combine(launch: Launch) -> Traffic:
    """The sums and statistics of all spans of a head."""
    k = launch.arguments
    vectors = 4 if k.WEIGHTED else 2
    sums, statistics = k.splits * k.count * k.width, k.splits * vectors * k.count
    moved = loaded((sums + statistics) * WIDE, (sums + statistics + k.splits * k.count) * WIDE)
    stored = k.count * k.width + 2 * k.count
    return Traffic(launch.programs * moved, launch.programs * stored * WIDE)


@traffic("landmark_attention.attend")
def attend(launch: Launch) -> Traffic:
    """Queries; y is stored."""
    k = launch.arguments
    moved = _over_spans(launch, _of_queries(k), 1, masks=1 if k.WEIGHTED else 0)
    return Traffic(moved, k.y.numel() * k.y.element_size(), _dots(launch, 1, 1 + k.WEIGHTED))


@traffic("landmark_attention.query_gradients")
def query_gradients(launch: Launch) -> Traffic:
    """Queries and the gradient of y. Sums over the span are stored, or the gradient of queries and one sum."""
    k = launch.arguments
    own, matrix = 0 if k.SUMS or not k.WEIGHTED else k.count * WIDE, k.count * k.width
    masks = 0 if not k.WEIGHTED else 1 if k.SUMS else 2
    moved = _over_spans(launch, _of_queries(k) + own, 2, masks)
    if k.SUMS:
        stored = launch.programs * (2 * matrix + 3 * k.count) * WIDE
        products = 3
    else:
        stored = k.grad.numel() * k.d_qkv.element_size() + (launch.programs * matrix * WIDE if k.WEIGHTED else 0)
        products = 2 + 2 * k.WEIGHTED
    return Traffic(moved, stored, _dots(launch, products, 1 + k.WEIGHTED))


@traffic("landmark_attention.key_gradients")
def key_gradients(launch: Launch) -> Traffic:
    """Keys and values, of which the gradients are stored, and a sum over the span."""
    k = launch.arguments
    matrix = k.count * k.width
    small = _bytes(k, k.w) + (2 * matrix + 2 * k.count) * WIDE
    moved = _over_spans(launch, small, 2, masks=2)
    positions = launch.grid[0] * k.time
    stored = 2 * positions * k.width * k.d_qkv.element_size() + launch.programs * matrix * WIDE
    return Traffic(moved, stored, _dots(launch, 4, 1))


def _bytes(k: SimpleNamespace, landmarks: object) -> int:
    """Of the matrix (c, d) of a head."""
    return k.count * k.width * landmarks.element_size()  # type: ignore[attr-defined]


def _of_queries(k: SimpleNamespace) -> int:
    """What a program that makes probabilities over landmarks loads of these."""
    small = _bytes(k, k.w) + _bytes(k, k.u) + k.count * (k.shared.element_size() + WIDE)
    if k.WEIGHTED:
        small += _bytes(k, k.f) + k.count * (WIDE + k.balance.element_size() + k.mean_weights.element_size())
    return small


def _over_spans(launch: Launch, small: int, parts: int, masks: int) -> int:
    """Bytes that all programs load: `small`, and `parts` vectors of each position of a span, and its mask so often."""
    k = launch.arguments
    masks = masks if k.HAS_MASK else 0
    total = 0
    for positions in blocks(k.time, k.span):
        vectors = positions * parts * k.width * k.qkv.element_size()
        total += loaded(small + vectors + positions * min(masks, 1), small + vectors + positions * masks)
    return launch.grid[0] * total


def _dots(launch: Launch, products: int, precise: int) -> dict[str, int]:
    """FLOPs of products of matrices of LANDMARKS, TIME and WIDTH, so many for every tile, of which `precise` are two.

    Those are products with landmarks in float32, where queries and keys have half precision.
    """
    k = launch.arguments
    products += precise * (2 if k.qkv.element_size() == 2 else 1)
    tiles = sum(len(blocks(positions, k.TIME)) for positions in blocks(k.time, k.span))
    flops = launch.grid[0] * tiles * products * 2 * k.LANDMARKS * k.TIME * k.WIDTH
    if k.qkv.element_size() == 2:
        return {TENSOR: flops}
    return {FLOAT32 if k.PRECISION == "tf32" else FLOAT32_DOT: flops}
