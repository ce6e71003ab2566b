// SPDX-License-Identifier: Apache-2.0
// Rows with arithmetic: weighted copies, weighted sums (combine), products (gradients of weights).
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/copy.cuh"
#include "kernels/cuda/element.cuh"

namespace moeccl::cuda {

inline constexpr int kGroups = 8;       // kernels::kMaxGroups
inline constexpr uint32_t kLanes = 32;  // kernels::kDotLanes

// Where rows are made of aligned 16-byte columns, lanes of a warp share a piece of a row: each lane has kColumns of its
// columns. Their loads are in flight at once, and what the lists say of the row is read once for all of them. The
// accumulators limit the number: they take 32 registers, and integer bytes are weighted through doubles.
template <class E>
struct Piece {
  static constexpr uint32_t kN = Pack<E>::kElements;
  static constexpr uint32_t kColumns = kN < 16 ? 4 : E::kIsFloat ? 2 : 1;
  size_t row_bytes;
  size_t apart;  // bytes between a lane's columns
  size_t begin;  // of the lane's first column in the row
  MOECCL_DEVICE bool has(uint32_t c) const { return begin + c * apart < row_bytes; }
};

// How rows of a length are cut into pieces.
template <class E>
struct Pieces {
  uint32_t lanes = kWarp;
  size_t apart, bytes, per_row;
  MOECCL_DEVICE explicit Pieces(size_t row_bytes) {
    while (lanes > 1 && lanes / 2 * size_t{16} >= row_bytes) lanes /= 2;
    apart = lanes * size_t{16};
    bytes = apart * Piece<E>::kColumns;
    per_row = (row_bytes + bytes - 1) / bytes;
  }
  MOECCL_DEVICE Piece<E> of(size_t number, size_t row_bytes, const Team& team) const {
    return {row_bytes, apart, number * bytes + team.thread % lanes * 16};
  }
};

template <class E>
MOECCL_DEVICE void scale_columns(const Piece<E>& piece, const uint8_t* src, uint8_t* dst, float weight) {
  constexpr uint32_t kColumns = Piece<E>::kColumns;
  Pack<E> p[kColumns];
  MOECCL_UNROLL
  for (uint32_t c = 0; c < kColumns; ++c)
    p[c].vec = piece.has(c) ? *reinterpret_cast<const Vec16*>(src + c * piece.apart) : Vec16{};
  MOECCL_UNROLL
  for (uint32_t c = 0; c < kColumns; ++c) {
    if (!piece.has(c)) break;
    MOECCL_UNROLL
    for (uint32_t j = 0; j < Piece<E>::kN; ++j) p[c].element[j] = E::round(weigh(E::load(p[c].element[j]), weight));
    *reinterpret_cast<Vec16*>(dst + c * piece.apart) = p[c].vec;
  }
}

template <class E>
MOECCL_DEVICE void scale_rows(const RowsKernelArgs& a, const Team& team) {
  using Stored = typename E::Stored;
  const auto dst = [&](size_t row) { return at(a.dst, pick(a.dst_index, a.dst_first, row) * a.row_bytes); };
  const auto src = [&](size_t row) { return at(a.src, pick(a.src_index, a.src_first, row) * a.row_bytes); };
  if (aligned16(a.dst) && aligned16(a.src) && a.row_bytes % 16 == 0) {
    const Pieces<E> pieces(a.row_bytes);
    for_each_in_share(team, pieces.lanes, a.count, pieces.per_row, [&](size_t row, size_t number) {
      const Piece<E> p = pieces.of(number, a.row_bytes, team);
      if (p.has(0)) scale_columns<E>(p, src(row) + p.begin, dst(row) + p.begin, a.weights[row]);
    });
    return;
  }
  const size_t per_row = a.row_bytes / sizeof(Stored);
  for (size_t i = team.thread; i < a.count * per_row; i += team.n_threads) {
    const size_t row = i / per_row, begin = i % per_row * sizeof(Stored);
    store_any<Stored>(dst(row) + begin, E::round(weigh(E::load(load_any<Stored>(src(row) + begin)), a.weights[row])));
  }
}

// -0 is the identity of float addition, see ColumnSum in kernels/host/reference.cc.
template <class E>
MOECCL_DEVICE typename E::Acc empty_sum() {
  return static_cast<typename E::Acc>(E::kIsFloat ? -0.0 : 0.0);
}

MOECCL_DEVICE const void* base_of(const ReduceRowsKernelArgs& a, const RowTermBits& term) {
  return in_global(a.bases[term.segment]);
}

// Sums one column of one row, with the nested groups of deterministic mode.
template <class E>
MOECCL_DEVICE typename E::Stored sum_column(const ReduceRowsKernelArgs& a, uint64_t begin, uint64_t end,
                                            size_t column) {
  using Acc = typename E::Acc;
  using Stored = typename E::Stored;
  Acc group[kGroups];
  MOECCL_UNROLL
  for (int g = 0; g < kGroups; ++g) group[g] = empty_sum<E>();
  for (uint64_t t = begin; t < end; ++t) {
    const RowTermBits term = a.terms[t];
    Acc v = E::load(load_any<Stored>(
        at(base_of(a, term), (static_cast<size_t>(term.row) * a.row_elements + column) * sizeof(Stored))));
    if (a.weights) v = weigh(v, a.weights[t]);
    group[kGroups - 1] = add(group[kGroups - 1], v);
    // The last term of a row closes all groups. The loop is unrolled, so that the accumulators stay in registers.
    const int close = !a.grouped ? 0 : t + 1 == end ? kGroups : term.close;
    MOECCL_UNROLL
    for (int g = kGroups - 1; g > 0; --g) {
      if (kGroups - 1 - g >= close) continue;
      group[g - 1] = add(group[g - 1], E::load(E::round(group[g])));
      group[g] = empty_sum<E>();
    }
  }
  return E::round(a.grouped ? group[0] : group[kGroups - 1]);
}

// The next two terms of a row's sum, which has `left` more; with only one left, the second one is not used.
struct TermPair {
  RowTermBits term[2];
  float weight[2];
  MOECCL_DEVICE TermPair(const ReduceRowsKernelArgs& a, uint64_t at, uint32_t left) {
    MOECCL_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      term[i] = i < left ? a.terms[at + i] : RowTermBits{};
      weight[i] = a.weights != nullptr && i < left ? a.weights[at + i] : 0;
    }
  }
};

// The terms of the row that a piece belongs to. A piece's are read before the sums of the piece before it, because
// their addresses would otherwise wait for memory twice before the rows themselves do.
struct SumPiece {
  uint64_t begin = 0;
  uint32_t terms = 0;
  MOECCL_DEVICE SumPiece(const ReduceRowsKernelArgs& a, size_t row) {
    if (row < a.count) begin = a.offsets[row], terms = static_cast<uint32_t>(a.offsets[row + 1] - begin);
  }
};

// Copies a lane's columns of a row with one term and without weights, whose sum is that term.
template <class E>
MOECCL_DEVICE void copy_columns(const ReduceRowsKernelArgs& a, const Piece<E>& piece, const RowTermBits& term,
                                uint8_t* dst) {
  const uint8_t* src = at(base_of(a, term), term.row * piece.row_bytes + piece.begin);
  Vec16 column[Piece<E>::kColumns];
  MOECCL_UNROLL
  for (uint32_t c = 0; c < Piece<E>::kColumns; ++c)
    if (piece.has(c)) column[c] = *reinterpret_cast<const Vec16*>(src + c * piece.apart);
  MOECCL_UNROLL
  for (uint32_t c = 0; c < Piece<E>::kColumns; ++c)
    if (piece.has(c)) *reinterpret_cast<Vec16*>(dst + c * piece.apart) = column[c];
}

// Sums a lane's columns of a row in term order, with the loads of two terms in flight. `next`: the first two.
template <class E>
MOECCL_DEVICE void sum_columns(const ReduceRowsKernelArgs& a, const Piece<E>& piece, const SumPiece& sum, TermPair next,
                               uint8_t* dst) {
  using Acc = typename E::Acc;
  constexpr uint32_t kColumns = Piece<E>::kColumns, kN = Piece<E>::kN;
  Acc acc[kColumns][kN];
  MOECCL_UNROLL
  for (uint32_t c = 0; c < kColumns; ++c) {
    MOECCL_UNROLL
    for (uint32_t j = 0; j < kN; ++j) acc[c][j] = empty_sum<E>();
  }
  for (uint32_t t = 0; t < sum.terms; t += 2) {
    const TermPair pair = next;
    Pack<E> p[2][kColumns];
    MOECCL_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      const uint8_t* src = at(base_of(a, pair.term[i]), pair.term[i].row * piece.row_bytes + piece.begin);
      MOECCL_UNROLL
      for (uint32_t c = 0; c < kColumns; ++c)
        p[i][c].vec =
            t + i < sum.terms && piece.has(c) ? *reinterpret_cast<const Vec16*>(src + c * piece.apart) : Vec16{};
    }
    if (t + 2 < sum.terms) next = TermPair(a, sum.begin + t + 2, sum.terms - t - 2);
    MOECCL_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      if (t + i >= sum.terms) break;
      MOECCL_UNROLL
      for (uint32_t c = 0; c < kColumns; ++c) {
        MOECCL_UNROLL
        for (uint32_t j = 0; j < kN; ++j) {
          const Acc v = E::load(p[i][c].element[j]);
          acc[c][j] = add(acc[c][j], a.weights ? weigh(v, pair.weight[i]) : v);
        }
      }
    }
  }
  MOECCL_UNROLL
  for (uint32_t c = 0; c < kColumns; ++c) {
    if (!piece.has(c)) break;
    Pack<E> out;
    MOECCL_UNROLL
    for (uint32_t j = 0; j < kN; ++j) out.element[j] = E::round(acc[c][j]);
    // A row without terms is zero, not the identity -0.
    *reinterpret_cast<Vec16*>(dst + c * piece.apart) = sum.terms == 0 ? Vec16{} : out.vec;
  }
}

// A piece of the rows, and how far the same warp's next one is. Without divisions, which would take longer than the
// sums.
struct PieceCursor {
  uint32_t row, number, rows_apart, numbers_apart, per_row;
  MOECCL_DEVICE PieceCursor(size_t first, size_t stride, size_t pieces_of_row)
      : row(static_cast<uint32_t>(first / pieces_of_row)),
        number(static_cast<uint32_t>(first % pieces_of_row)),
        rows_apart(static_cast<uint32_t>(stride / pieces_of_row)),
        numbers_apart(static_cast<uint32_t>(stride % pieces_of_row)),
        per_row(static_cast<uint32_t>(pieces_of_row)) {}
  MOECCL_DEVICE void advance() {
    row += rows_apart;
    number += numbers_apart;
    if (number >= per_row) number -= per_row, ++row;
  }
};

// Pieces of the rows go to warps in turn, because rows differ in their numbers of terms.
template <class E>
MOECCL_DEVICE void reduce_packs(const ReduceRowsKernelArgs& a, const Team& team) {
  const size_t row_bytes = a.row_elements * sizeof(typename E::Stored);
  const Pieces<E> pieces(row_bytes);
  PieceCursor own(team.thread / pieces.lanes, team.n_threads / pieces.lanes, pieces.per_row), ahead = own;
  SumPiece sum(a, ahead.row);
  ahead.advance();
  SumPiece next(a, ahead.row);
  TermPair terms(a, sum.begin, sum.terms);
  for (; own.row < a.count; own.advance()) {
    const TermPair next_terms(a, next.begin, next.terms);
    ahead.advance();
    const SumPiece after(a, ahead.row);
    const Piece<E> p = pieces.of(own.number, row_bytes, team);
    uint8_t* dst = at(a.dst, pick(a.dst_index, a.dst_first, own.row) * row_bytes + p.begin);
    if (p.has(0)) {
      if (a.weights == nullptr && sum.terms == 1)
        copy_columns<E>(a, p, terms.term[0], dst);
      else
        sum_columns<E>(a, p, sum, terms, dst);
    }
    sum = next;
    terms = next_terms;
    next = after;
  }
}

// Sums rows of any alignment, and the nested groups of deterministic mode.
template <class E>
MOECCL_DEVICE void reduce_elements(const ReduceRowsKernelArgs& a, const Team& team) {
  using Stored = typename E::Stored;
  for (size_t i = team.thread; i < a.count * a.row_elements; i += team.n_threads) {
    const size_t row = i / a.row_elements, column = i % a.row_elements;
    const uint64_t first = a.offsets[row], last = a.offsets[row + 1];
    store_any<Stored>(at(a.dst, (pick(a.dst_index, a.dst_first, row) * a.row_elements + column) * sizeof(Stored)),
                      first == last ? Stored{} : sum_column<E>(a, first, last, column));
  }
}

// Returns whether reduce_packs() can sum these rows. All lanes of a warp take part, and share the loads of the bases.
MOECCL_DEVICE bool has_packs(const ReduceRowsKernelArgs& a, size_t row_bytes) {
  bool packs = a.grouped == 0 && aligned16(a.dst) && row_bytes % 16 == 0;
  for (uint32_t k = thread_index() % kWarp; k < a.n_bases; k += kWarp) packs = packs && aligned16(a.bases[k]);
  return ballot(!packs) == 0;
}

template <class E>
MOECCL_DEVICE void reduce_rows(const ReduceRowsKernelArgs& a, const Team& team) {
  if (has_packs(a, a.row_elements * sizeof(typename E::Stored)))
    reduce_packs<E>(a, team);
  else
    reduce_elements<E>(a, team);
}

// One warp handles each row: lane l sums elements j with j % 32 == l in order, then upper halves are added onto lower
// halves.
template <class E>
MOECCL_DEVICE void dot_rows(const DotRowsKernelArgs& a, const Team& team) {
  using Stored = typename E::Stored;
  using Sum = typename std::conditional<sizeof(typename E::Acc) == 4 && E::kIsFloat, float, double>::type;
  const size_t row_bytes = a.row_elements * sizeof(Stored);
  const size_t rounds = (a.count + team.n_warps() - 1) / team.n_warps();
  for (size_t round = 0; round < rounds; ++round) {
    const size_t row = round * team.n_warps() + team.warp();
    Sum sum = 0;
    if (row < a.count) {
      const uint8_t* x = at(a.a, pick(a.a_index, 0, row) * row_bytes);
      const uint8_t* y = at(a.b, pick(a.b_index, 0, row) * row_bytes);
      for (size_t j = team.lane(); j < a.row_elements; j += kLanes)
        sum += static_cast<Sum>(E::load(load_any<Stored>(x + j * sizeof(Stored)))) *
               static_cast<Sum>(E::load(load_any<Stored>(y + j * sizeof(Stored))));
    }
    for (uint32_t width = kLanes / 2; width > 0; width /= 2) {
      const Sum other = shuffle_xor(sum, width);
      if (team.lane() < width) sum += other;
    }
    if (row < a.count && team.lane() == 0) a.out[row] = static_cast<float>(sum);
  }
}

}  // namespace moeccl::cuda
