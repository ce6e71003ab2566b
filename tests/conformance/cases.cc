// SPDX-License-Identifier: Apache-2.0
#include "tests/conformance/cases.h"

#include <algorithm>
#include <numeric>

namespace moeccl::testing {
namespace {

size_t sz(int v) { return static_cast<size_t>(v); }

// Draws small, odd, prime and round counts, and occasionally one that spans many chunks.
size_t draw_count(std::mt19937_64& random, size_t most) {
  static constexpr size_t kSpecial[] = {0,   1,   1,   2,   3,    7,    13,   31,    61,   64,
                                        127, 251, 509, 512, 1021, 4093, 4096, 16381, 65521};
  const uint64_t kind = random() % 10;
  size_t count = 0;
  if (kind < 6)
    count = kSpecial[random() % std::size(kSpecial)];
  else if (kind < 9)
    count = random() % 5000;
  else
    count = random() % (most + 1);
  return std::min(count, most);
}

// Draws sparse, dense and skewed exchanges, including rows and columns of zeros.
std::vector<size_t> draw_matrix(std::mt19937_64& random, int n, size_t most) {
  std::vector<size_t> matrix(sz(n) * sz(n));
  const uint64_t density = 1 + random() % 4;
  const size_t scale = std::max<size_t>(1, draw_count(random, most));
  for (size_t& m : matrix) m = random() % 4 < density ? random() % (scale + 1) : 0;
  if (random() % 4 == 0) std::fill_n(matrix.begin() + static_cast<ptrdiff_t>(random() % sz(n) * sz(n)), n, 0);
  if (random() % 4 == 0) {
    const size_t column = random() % sz(n);
    for (size_t r = 0; r < sz(n); ++r) matrix[r * sz(n) + column] = 0;
  }
  return matrix;
}

// Returns the largest number of blocks of `count` elements in one rank's buffer.
size_t blocks(moecclOp_t op, int n) {
  return op == moecclOpAllReduce || op == moecclOpReduce || op == moecclOpBroadcast ? 1 : sz(n);
}

size_t sent_before(const Case& c, int n, int from, int to) {
  const auto row = c.matrix.begin() + static_cast<ptrdiff_t>(sz(from) * sz(n));
  return std::accumulate(row, row + to, size_t{0});
}

Number plain(const Case& c, int rank, size_t i) {
  // Bits that every type can carry: numbers of Max's range, so that NaNs never blur a comparison.
  return input_for(c.type, moecclMax, 1, rank, i, c.seed);
}

Number reduced(const Case& c, int n, size_t i) {
  Number sum{};
  for (int r = 0; r < n; ++r) {
    Number v = input_at(c, n, r, i);
    if (c.reduction == kPreMulSum) v = multiply(c.type, v, scalar_for(c.type, r, c.seed));
    sum = r == 0 ? v : combine(c.type, c.reduction, sum, v);
  }
  return c.reduction == moecclAvg ? divide(c.type, sum, n) : sum;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const World& w) {
  return out << w.n << " ranks, " << w.mode << ", topology \"" << w.topology << "\""
             << (w.deterministic ? ", deterministic" : "") << ", staging " << w.staging_bytes;
}

std::string Case::describe() const {
  std::string text = moecclOpName(op);
  text += std::string(" ") + type_name(type) + (reduces() ? std::string(" ") + reduction_name(reduction) : "");
  text += " count " + std::to_string(count) + " root " + std::to_string(root);
  if (in_place) text += " in place";
  text += std::string(heap_send ? " heap" : " malloc") + "+" + std::to_string(send_offset);
  text += std::string(heap_recv ? " -> heap" : " -> malloc") + "+" + std::to_string(recv_offset);
  if (async) text += " on a stream";
  if (!algorithm.empty()) text += " by " + algorithm;
  return text;
}

Case draw_case(std::mt19937_64& random, const World& world, const std::vector<std::vector<std::string>>& names,
               size_t max_bytes) {
  const int n = world.n;
  Case c;
  c.op = static_cast<moecclOp_t>(random() % (moecclOpSendRecv + 1));
  c.type = static_cast<moecclDataType_t>(random() % MOECCL_NUM_DATA_TYPES);
  c.reduction = static_cast<int>(random() % (MOECCL_NUM_REDUCTIONS + 1));
  c.root = static_cast<int>(random() % sz(n));
  c.seed = random();
  c.send_offset = random() % 3 == 0 ? random() % 17 : 0;
  c.recv_offset = random() % 3 == 0 ? random() % 17 : 0;
  c.heap_send = random() % 2 == 0;
  c.heap_recv = random() % 4 == 0 ? !c.heap_send : c.heap_send;  // mostly the same kind, as in real programs
  c.async = random() % 5 == 0;
  // A reference reads n inputs for every output of n ranks, so large ones are rarer with many ranks.
  const size_t budget = (random() % 8 == 0 ? 16u << 20 : 1u << 20) / (blocks(c.op, n) * sz(n));
  const size_t most = std::min(max_bytes / (moecclTypeSize(c.type) * blocks(c.op, n)), budget) - 32;
  c.count = draw_count(random, most);
  const bool vectors = c.op == moecclOpAllToAllv || c.op == moecclOpSendRecv;
  if (vectors) c.matrix = draw_matrix(random, n, most);
  c.in_place = !vectors && random() % 3 == 0;
  if (c.in_place) c.heap_recv = c.heap_send;
  const std::vector<std::string>& choices = names[c.op];
  if (!choices.empty() && random() % 2 == 0) c.algorithm = choices[random() % choices.size()];
  return c;
}

size_t send_elements(const Case& c, int n, int rank) {
  switch (c.op) {
    case moecclOpReduceScatter:
    case moecclOpAllToAll:
      return c.count * sz(n);
    case moecclOpScatter:
      return rank == c.root ? c.count * sz(n) : 0;
    case moecclOpBroadcast:
      return rank == c.root ? c.count : 0;
    case moecclOpAllToAllv:
    case moecclOpSendRecv:
      return sent_before(c, n, rank, n);
    default:
      return c.count;
  }
}

size_t recv_elements(const Case& c, int n, int rank) {
  switch (c.op) {
    case moecclOpAllGather:
    case moecclOpAllToAll:
      return c.count * sz(n);
    case moecclOpGather:
      return rank == c.root ? c.count * sz(n) : 0;
    case moecclOpReduce:
      return rank == c.root ? c.count : 0;
    case moecclOpAllToAllv:
    case moecclOpSendRecv: {
      size_t sum = 0;
      for (int r = 0; r < n; ++r) sum += c.matrix[sz(r) * sz(n) + sz(rank)];
      return sum;
    }
    default:
      return c.count;
  }
}

Number input_at(const Case& c, int n, int rank, size_t i) {
  return c.reduces() ? input_for(c.type, c.reduction, n, rank, i, c.seed) : plain(c, rank, i);
}

bool expected_at(const Case& c, int n, int rank, size_t i, Number* value) {
  const size_t block = c.count == 0 ? 0 : i / c.count;
  const size_t within = c.count == 0 ? 0 : i % c.count;
  switch (c.op) {
    case moecclOpAllReduce:
    case moecclOpReduce:
      *value = reduced(c, n, i);
      return true;
    case moecclOpReduceScatter:
      *value = reduced(c, n, sz(rank) * c.count + i);
      return true;
    case moecclOpBroadcast:
      *value = plain(c, c.root, i);
      return true;
    case moecclOpAllGather:
    case moecclOpGather:
      *value = plain(c, static_cast<int>(block), within);
      return true;
    case moecclOpAllToAll:
      *value = plain(c, static_cast<int>(block), sz(rank) * c.count + within);
      return true;
    case moecclOpScatter:
      *value = plain(c, c.root, sz(rank) * c.count + i);
      return true;
    default:
      break;
  }
  size_t at = i;
  for (int r = 0; r < n; ++r) {  // AllToAllv and SendRecv: blocks are in the order of the source ranks
    const size_t length = c.matrix[sz(r) * sz(n) + sz(rank)];
    if (at < length) {
      *value = plain(c, r, sent_before(c, n, r, rank) + at);
      return true;
    }
    at -= length;
  }
  return false;
}

bool rounds(const Case& c) { return c.reduces() && c.reduction == moecclAvg && is_float(c.type); }

}  // namespace moeccl::testing
