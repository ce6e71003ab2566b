// SPDX-License-Identifier: Apache-2.0
// Uneven all-to-all, with a generated pattern in which more distant ranks get more, or a matrix of bytes from a file.
// As in nccl-tests, NCCL_TESTS_ALLTOALLV_SPREAD (0 even .. 1 by distance, the default), _MATRIX_FILE (or --matrix) and
// _MATRIX_SCALE select it.
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "perf/common/collective.h"
#include "perf/common/fail.h"

namespace {

using perf::Call, perf::Place, perf::Segment, perf::Shape;

// Blocks are whole 16-byte units, as in nccl-tests.
size_t align(double bytes) { return static_cast<size_t>(bytes) / 16 * 16; }

struct Traffic {
  double spread = 1;
  std::vector<std::vector<size_t>> matrix;  // bytes from row to column; empty: generated

  // total: the bytes that each rank sends in the generated pattern.
  size_t bytes(int from, int to, int n_ranks, size_t total) const {
    if (!matrix.empty()) return matrix[static_cast<size_t>(from)][static_cast<size_t>(to)];
    const double all = static_cast<double>(total), n = n_ranks;
    if (n_ranks == 1) return align(all);
    const double distance = (to - from + n_ranks) % n_ranks;
    return align((1 - spread) * all / n + spread * all * distance / (n * (n - 1) / 2));
  }
};
Traffic traffic;

double from_environment(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  return end == text || *end != '\0' ? otherwise : value;
}

void read_matrix(const std::string& path, int n_ranks) {
  const double scale = std::max(0.0, from_environment("NCCL_TESTS_ALLTOALLV_MATRIX_SCALE", 1));
  std::ifstream file(path);
  if (!file) perf::fail("--matrix " + path + ": cannot be opened: " + std::strerror(errno));
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream cells(line);
    std::vector<size_t> row;
    double bytes = 0;
    while (cells >> bytes) {
      if (!(bytes >= 0 && bytes * scale < 1e18))
        perf::fail(path + ": row " + std::to_string(traffic.matrix.size()) + " holds " + std::to_string(bytes) +
                   ", which is not a number of bytes");
      row.push_back(align(bytes * scale));
    }
    if (!cells.eof())
      perf::fail(path + ": row " + std::to_string(traffic.matrix.size()) + " holds something else than numbers");
    if (!row.empty()) traffic.matrix.push_back(row);
  }
  const size_t rows = traffic.matrix.size();
  for (size_t i = 0; i < rows; i++)
    if (traffic.matrix[i].size() != rows)
      perf::fail(path + ": " + std::to_string(rows) + " rows, but row " + std::to_string(i) + " has " +
                 std::to_string(traffic.matrix[i].size()) + " columns; the matrix must be square");
  if (rows < static_cast<size_t>(n_ranks))
    perf::fail(path + ": a matrix of " + std::to_string(rows) + " for " + std::to_string(n_ranks) + " ranks");
}

void prepare(const perf::Options& options, int n_ranks) {
  traffic.spread = std::clamp(from_environment("NCCL_TESTS_ALLTOALLV_SPREAD", 1), 0.0, 1.0);
  if (!options.matrix_file.empty()) read_matrix(options.matrix_file, n_ranks);
}

bool fixed_size() { return !traffic.matrix.empty(); }

struct Blocks {
  std::vector<size_t> counts, displs;
};
// Returns what `rank` sends (or receives), in elements. `count` is that of Shape.
Blocks blocks(const Place& place, size_t count, bool sends) {
  const size_t total = count * place.element_bytes * static_cast<size_t>(place.n_ranks);
  Blocks b;
  size_t at = 0;
  for (int peer = 0; peer < place.n_ranks; peer++) {
    const int from = sends ? place.rank : peer, to = sends ? peer : place.rank;
    b.counts.push_back(traffic.bytes(from, to, place.n_ranks, total) / place.element_bytes);
    b.displs.push_back(at);
    at += b.counts.back();
  }
  return b;
}

Shape shape(size_t elements, size_t element_bytes, int n_ranks) {
  Shape s;
  s.count = fixed_size() ? 0 : perf::block_elements(elements, element_bytes, n_ranks);
  for (int rank = 0; rank < n_ranks; rank++) {
    const Place place = {.rank = rank, .n_ranks = n_ranks, .root = 0, .element_bytes = element_bytes};
    const Blocks sent = blocks(place, s.count, true), received = blocks(place, s.count, false);
    s.send = std::max(s.send, sent.displs.back() + sent.counts.back());
    s.recv = std::max(s.recv, received.displs.back() + received.counts.back());
    if (!fixed_size()) break;  // the generated pattern is the same for every rank
  }
  return s;
}

// Caches the blocks of the last call, so that timed calls do not compute them.
struct Exchange {
  Place place;
  size_t count = 0;
  Blocks sent, received;
};

const Exchange& exchange_of(const Call& c) {
  thread_local Exchange last;
  const size_t element_bytes = moecclTypeSize(c.type);
  const bool same = last.place.rank == c.rank && last.place.n_ranks == c.n_ranks &&
                    last.place.element_bytes == element_bytes && last.count == c.count && !last.sent.counts.empty();
  if (same) return last;
  last.place = {.rank = c.rank, .n_ranks = c.n_ranks, .root = 0, .element_bytes = element_bytes};
  last.count = c.count;
  last.sent = blocks(last.place, c.count, true);
  last.received = blocks(last.place, c.count, false);
  return last;
}

moecclResult_t run(const Call& c) {
  const Exchange& e = exchange_of(c);
  return moecclAllToAllv(c.send, e.sent.counts.data(), e.sent.displs.data(), c.recv, e.received.counts.data(),
                         e.received.displs.data(), c.type, c.comm, c.stream);
}

std::vector<Segment> expected(const Place& place, size_t count) {
  std::vector<Segment> segments;
  for (int source = 0; source < place.n_ranks; source++) {
    Place there = place;
    there.rank = source;
    const Blocks sent = blocks(there, count, true);
    const size_t to_me = static_cast<size_t>(place.rank);
    segments.push_back({source, sent.displs[to_me], sent.counts[to_me]});
  }
  return segments;
}

constexpr perf::Collective kCollective = {
    .program = "alltoallv_perf",
    .op = moecclOpAllToAllv,
    .reduces = false,
    .rooted = false,
    .in_place = perf::InPlace::kNone,  // moecclAllToAllv refuses blocks that overlap
    .bus_factor = perf::factor_others,
    .shape = shape,
    .run = run,
    .expected = expected,
    .prepare = prepare,
    .fixed_size = fixed_size,
};

}  // namespace

int main(int argc, char** argv) { return perf::perf_main(argc, argv, kCollective); }
