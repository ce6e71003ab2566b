// SPDX-License-Identifier: Apache-2.0
// The benchmarks of all standard collectives except AllToAllv, one row each. Every binary is built with its row's name.
#include <cstring>

#include "perf/common/collective.h"

namespace {

using perf::Call, perf::Collective, perf::kReduced, perf::Place, perf::Segment, perf::Shape;

Shape equal(size_t elements, size_t, int) { return {.send = elements, .recv = elements, .count = elements}; }

size_t times(size_t block, int n_ranks) { return block * static_cast<size_t>(n_ranks); }

Shape gathered(size_t elements, size_t element_bytes, int n_ranks) {
  const size_t block = perf::block_elements(elements, element_bytes, n_ranks);
  return {.send = block, .recv = times(block, n_ranks), .count = block, .send_in_place = block};
}

Shape scattered(size_t elements, size_t element_bytes, int n_ranks) {
  const size_t block = perf::block_elements(elements, element_bytes, n_ranks);
  return {.send = times(block, n_ranks), .recv = block, .count = block, .recv_in_place = block};
}

Shape exchanged(size_t elements, size_t element_bytes, int n_ranks) {
  const size_t block = perf::block_elements(elements, element_bytes, n_ranks);
  return {.send = times(block, n_ranks), .recv = times(block, n_ranks), .count = block};
}

using Segments = std::vector<Segment>;

// Returns block `index` of what each rank sends.
Segments from_all(const Place& place, int index, size_t count) {
  Segments segments;
  for (int r = 0; r < place.n_ranks; r++) segments.push_back({r, times(count, index), count});
  return segments;
}

double factor_all_reduce(int n_ranks) { return 2 * perf::factor_others(n_ranks); }

// A ring: each rank sends to the next one and receives from the one before.
int before(int rank, int n_ranks) { return (rank + n_ranks - 1) % n_ranks; }

moecclResult_t send_around(const Call& c) {
  moecclResult_t result = moecclGroupStart();
  if (result != moecclSuccess) return result;
  const moecclResult_t sent = moecclSend(c.send, c.count, c.type, (c.rank + 1) % c.n_ranks, c.comm, c.stream);
  const moecclResult_t received = moecclRecv(c.recv, c.count, c.type, before(c.rank, c.n_ranks), c.comm, c.stream);
  result = moecclGroupEnd();
  if (sent != moecclSuccess) return sent;
  return received != moecclSuccess ? received : result;
}

// clang-format off
constexpr Collective kCollectives[] = {
    // program, operation, reduces, rooted, in place, bus factor, shape
    {"all_reduce_perf", moecclOpAllReduce, true, false, true, factor_all_reduce, equal,
     [](const Call& c) { return moecclAllReduce(c.send, c.recv, c.count, c.type, c.op, c.comm, c.stream); },
     [](const Place&, size_t count) { return Segments{{kReduced, 0, count}}; }},
    {"all_gather_perf", moecclOpAllGather, false, false, true, perf::factor_others, gathered,
     [](const Call& c) { return moecclAllGather(c.send, c.recv, c.count, c.type, c.comm, c.stream); },
     [](const Place& p, size_t count) { return from_all(p, 0, count); }},
    {"alltoall_perf", moecclOpAllToAll, false, false, true, perf::factor_others, exchanged,
     [](const Call& c) { return moecclAllToAll(c.send, c.recv, c.count, c.type, c.comm, c.stream); },
     [](const Place& p, size_t count) { return from_all(p, p.rank, count); }},
    {"broadcast_perf", moecclOpBroadcast, false, true, true, perf::factor_one, equal,
     [](const Call& c) { return moecclBroadcast(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); },
     [](const Place& p, size_t count) { return Segments{{p.root, 0, count}}; }},
    {"gather_perf", moecclOpGather, false, true, true, perf::factor_others, gathered,
     [](const Call& c) { return moecclGather(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); },
     [](const Place& p, size_t count) { return p.rank == p.root ? from_all(p, 0, count) : Segments(); }},
    {"reduce_perf", moecclOpReduce, true, true, true, perf::factor_one, equal,
     [](const Call& c) { return moecclReduce(c.send, c.recv, c.count, c.type, c.op, c.root, c.comm, c.stream); },
     [](const Place& p, size_t count) { return p.rank == p.root ? Segments{{kReduced, 0, count}} : Segments(); }},
    {"reduce_scatter_perf", moecclOpReduceScatter, true, false, true, perf::factor_others, scattered,
     [](const Call& c) { return moecclReduceScatter(c.send, c.recv, c.count, c.type, c.op, c.comm, c.stream); },
     [](const Place& p, size_t count) { return Segments{{kReduced, times(count, p.rank), count}}; }},
    {"scatter_perf", moecclOpScatter, false, true, true, perf::factor_others, scattered,
     [](const Call& c) { return moecclScatter(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); },
     [](const Place& p, size_t count) { return Segments{{p.root, times(count, p.rank), count}}; }},
    {"sendrecv_perf", moecclOpSendRecv, false, false, false, perf::factor_one, equal, send_around,
     [](const Place& p, size_t count) { return Segments{{before(p.rank, p.n_ranks), 0, count}}; }},
};
// clang-format on

}  // namespace

int main(int argc, char** argv) {
  for (const Collective& c : kCollectives)
    if (std::strcmp(c.program, PERF_PROGRAM) == 0) return perf::perf_main(argc, argv, c);
  return 1;
}
