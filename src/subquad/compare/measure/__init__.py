"""What is measured on the machine, for all mechanisms side by side.

`base` says what a measurement is; `cache` stores what was measured; `worker` is the process that measures. A new
measurement is one file here and one entry in this list, which is the order in which they are made.
"""

from subquad.compare.measure.base import Measurement
from subquad.compare.measure.decoding import Decoding
from subquad.compare.measure.lengths import Lengths
from subquad.compare.measure.swap import Swap

MEASUREMENTS: tuple[Measurement, ...] = (Lengths(), Decoding(), Swap())
