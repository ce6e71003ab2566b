# SPDX-License-Identifier: Apache-2.0
"""What the rows of all high-throughput calls have in common: their layers, the routings that a handle holds, and sizes."""
import torch

from . import _native

ALIGNED = 32  # V2 counts tensors and rows of bytes in multiples of this


def round_up(n, multiple):
    """Returns the multiple that is n or the next larger one. n: an int, or a tensor of them."""
    return -(-n // multiple) * multiple


def by_column(n_rows, columns, dtype, device):
    """Returns an uninitialized tensor [n_rows, columns] that lies column by column, each of a multiple of four rows."""
    return torch.empty((columns, round_up(n_rows, 4)), dtype=dtype, device=device).t()[:n_rows]


class Routed:
    """What is behind a handle. Its routings are made again on the communicator of each Buffer that uses the handle."""
    layout, align, ordered = _native.ROWS, 1, False  # of its layers

    def __init__(self, n_tokens, n_ranks, n_targets):
        """n_targets: the "experts" of its layers."""
        self.n_tokens, self.n_ranks, self.n_targets = n_tokens, n_ranks, n_targets
        self.index, self.max_tokens = None, 0  # int32 [T, k], each token's targets; the most tokens of a rank that a layer takes
        self.n_rows = 0  # received
        self.sent, self.received = [], []  # what goes to and comes from each rank
        self.routings = []  # the same choices on layers for different kinds of rows, and on different communicators

    def routing(self, comm, row_bytes, type_, scaled_row_bytes=0, scale_bytes=0):
        """Returns this communicator's routing for rows of this kind. The call is collective if there is none yet."""
        for found in self.routings:
            shape = found.shape
            if found.comm is not comm or (shape.row_bytes, shape.type) != (row_bytes, type_):
                continue
            if not scale_bytes or (shape.scaled_row_bytes, shape.scale_bytes) == (scaled_row_bytes, scale_bytes):
                return found
        layer = comm.layer(_native.Shape(row_bytes, type_, self.index.size(1), self.n_targets, self.max_tokens, self.layout,
                                         scale_bytes, scaled_row_bytes, self.align, self.ordered))
        made = layer.routing(self.index)
        self.routings.append(made)
        return made


class Rows:
    """The rows of one dispatch, x[T, H], and what its layer is told about them."""

    def __init__(self, x, others, scale_bytes):
        """others: further tensors [T, n] that the results have, too, or None for each. scale_bytes: of what travels with each row, or None
        if nothing does."""
        self.x = x.contiguous()
        self._forms = (self.x, *others)
        self.scale_bytes = scale_bytes or 0
        # With quantized rows the layer's type is bfloat16, so that combine can use the same routing.
        quantized = x.element_size() == 1
        self.type = _native.TYPES[torch.bfloat16 if quantized else x.dtype]
        self.row_bytes = x.size(1) * (2 if quantized else x.element_size())
        self.scaled_row_bytes = x.size(1) * x.element_size() if scale_bytes is not None else 0

    def routing(self, comm, state):
        return state.routing(comm, self.row_bytes, self.type, self.scaled_row_bytes, self.scale_bytes)

    def outputs(self, memory, n_out):
        """Returns the tensors that a dispatch of n_out rows fills: for x and each of the others, or None."""
        return [form if form is None else memory.empty((n_out, form.size(1)), form.dtype, form.device) for form in self._forms]
