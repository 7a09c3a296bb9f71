"""Bank conflicts of the loads of matrix operands, from Triton's intermediate code.

`ldmatrix` reads 8 rows of 16 bytes at a time from shared memory, whose 32 banks of 4 bytes serve 8 such rows at once if
they lie in different banks. Where they lie follows from the operand's shared layout alone (Triton's documentation,
"SwizzledSharedEncodingAttr").
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

_LOAD = re.compile(r"ttg\.local_load .*!ttg\.memdesc<([\dx]+)x[a-z]+(\d+), (#\w+), .*#ttg\.dot_op<")
_LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.swizzled_shared<\{vec = (\d+), perPhase = (\d+), maxPhase = (\d+), order = \[([\d, ]+)\]", re.M
)
_ROWS, _ROW_BYTES = 8, 16


class SwizzledLayout(NamedTuple):
    """Elements in `order`, fastest dimension first; units of `vec` are permuted by a phase of the second fastest."""

    vec: int
    per_phase: int
    max_phase: int
    order: tuple[int, ...]

    def offset(self, index: list[int], shape: list[int]) -> int:
        """Return the offset of an element, in elements."""
        first, second = self.order[:2]
        phase = index[second] // self.per_phase % self.max_phase
        place = list(index)
        place[first] = (index[first] // self.vec ^ phase) * self.vec + index[first] % self.vec
        strides = [math.prod(shape[dim] for dim in self.order[:rank]) for rank in range(len(shape))]
        return sum(place[dim] * stride for dim, stride in zip(self.order, strides, strict=True))

    def conflicts(self, shape: list[int], item_bytes: int) -> int:
        """Return how many of 8 neighbouring rows of a matrix, the last two dimensions, lie in the same banks."""
        across = ({len(shape) - 2, len(shape) - 1} - {self.order[0]}).pop()
        banks: Counter[int] = Counter()
        for row in range(min(_ROWS, shape[across])):
            index = [row if dim == across else 0 for dim in range(len(shape))]
            banks[self.offset(index, shape) * item_bytes // _ROW_BYTES % _ROWS] += 1
        return max(banks.values())


def most_conflicts(ttgir: str) -> int:
    """Return the most conflicts of a kernel's operands in swizzled layouts; 1 is none, 0 is no such operand."""
    layouts = {
        name: SwizzledLayout(int(vec), int(per_phase), int(max_phase), tuple(map(int, order.split(","))))
        for name, vec, per_phase, max_phase, order in _LAYOUT.findall(ttgir)
    }
    loads = [
        layouts[name].conflicts([int(size) for size in shape.split("x")], int(bits) // 8)
        for shape, bits, name in _LOAD.findall(ttgir)
        if name in layouts
    ]
    return max(loads, default=0)
