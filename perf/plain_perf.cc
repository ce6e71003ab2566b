// SPDX-License-Identifier: Apache-2.0
// The benchmarks of all standard collectives except AllToAllv, one row each. Every binary is linked with its row's
// name.
#include <bit>
#include <cstring>
#include <initializer_list>

#include "perf/common/collective.h"
#include "perf/common/fail.h"
#include "perf/plain_name.h"

namespace {

using perf::Call, perf::Collective, perf::kReduced, perf::Place, perf::Segment, perf::Shape;
using enum perf::InPlace;

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

struct Message {
  const void* send;
  void* recv;
  size_t count;
  int to, from;
};

moecclResult_t exchange(const Call& c, std::initializer_list<Message> messages) {
  moecclResult_t result = moecclGroupStart();
  if (result != moecclSuccess) return result;
  for (const Message& m : messages) {
    if (result == moecclSuccess) result = moecclSend(m.send, m.count, c.type, m.to, c.comm, c.stream);
    if (result == moecclSuccess) result = moecclRecv(m.recv, m.count, c.type, m.from, c.comm, c.stream);
  }
  const moecclResult_t ended = moecclGroupEnd();
  return result != moecclSuccess ? result : ended;
}

moecclResult_t send_around(const Call& c) {
  return exchange(c, {{c.send, c.recv, c.count, (c.rank + 1) % c.n_ranks, before(c.rank, c.n_ranks)}});
}

// A hypercube: round k exchanges all blocks so far with the rank whose number differs in bit k. Round 0 also puts the
// rank's own block in its place.
int hypercube_rounds(int n_ranks) { return n_ranks > 1 ? std::countr_zero(static_cast<unsigned>(n_ranks)) : 1; }

moecclResult_t exchange_in_hypercube(const Call& c) {
  const size_t block = c.count * moecclTypeSize(c.type);
  const auto at = [&](int rank) { return static_cast<char*>(c.recv) + times(block, rank); };
  const int bit = 1 << c.round, peer = c.rank ^ bit, mine = c.rank & ~(bit - 1);
  const Message own = {c.send, at(c.rank), c.count, c.rank, c.rank};
  const Message blocks = {c.round == 0 ? c.send : at(mine), at(mine ^ bit), times(c.count, bit), peer, peer};
  if (c.n_ranks == 1) return exchange(c, {own});
  return c.round == 0 && c.send != at(c.rank) ? exchange(c, {own, blocks}) : exchange(c, {blocks});
}

void check_hypercube(const perf::Options&, int n_ranks) {
  if (!std::has_single_bit(static_cast<unsigned>(n_ranks)))
    perf::fail("hypercube_perf runs on a power of two of ranks, not on " + std::to_string(n_ranks));
}

// clang-format off
constexpr Collective kCollectives[] = {
    // program, operation, reduces, rooted, in place, bus factor, shape
    {"all_reduce_perf", moecclOpAllReduce, true, false, kChecked, factor_all_reduce, equal,
     [](const Call& c) { return moecclAllReduce(c.send, c.recv, c.count, c.type, c.op, c.comm, c.stream); },
     [](const Place&, size_t count) { return Segments{{kReduced, 0, count}}; }},
    {"all_gather_perf", moecclOpAllGather, false, false, kChecked, perf::factor_others, gathered,
     [](const Call& c) { return moecclAllGather(c.send, c.recv, c.count, c.type, c.comm, c.stream); },
     [](const Place& p, size_t count) { return from_all(p, 0, count); }},
    {"alltoall_perf", moecclOpAllToAll, false, false, kChecked, perf::factor_others, exchanged,
     [](const Call& c) { return moecclAllToAll(c.send, c.recv, c.count, c.type, c.comm, c.stream); },
     [](const Place& p, size_t count) { return from_all(p, p.rank, count); }},
    {"broadcast_perf", moecclOpBroadcast, false, true, kChecked, perf::factor_one, equal,
     [](const Call& c) { return moecclBroadcast(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); },
     [](const Place& p, size_t count) { return Segments{{p.root, 0, count}}; }},
    {"gather_perf", moecclOpGather, false, true, kChecked, perf::factor_others, gathered,
     [](const Call& c) { return moecclGather(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); },
     [](const Place& p, size_t count) { return p.rank == p.root ? from_all(p, 0, count) : Segments(); }},
    {.program = "hypercube_perf", .op = moecclOpSendRecv, .reduces = false, .rooted = false, .in_place = kChecked,
     .bus_factor = perf::factor_one, .shape = gathered, .run = exchange_in_hypercube,
     .expected = [](const Place& p, size_t count) { return from_all(p, 0, count); },
     .prepare = check_hypercube, .rounds = hypercube_rounds, .counted = perf::factor_others},
    {"reduce_perf", moecclOpReduce, true, true, kChecked, perf::factor_one, equal,
     [](const Call& c) { return moecclReduce(c.send, c.recv, c.count, c.type, c.op, c.root, c.comm, c.stream); },
     [](const Place& p, size_t count) { return p.rank == p.root ? Segments{{kReduced, 0, count}} : Segments(); }},
    {"reduce_scatter_perf", moecclOpReduceScatter, true, false, kChecked, perf::factor_others, scattered,
     [](const Call& c) { return moecclReduceScatter(c.send, c.recv, c.count, c.type, c.op, c.comm, c.stream); },
     [](const Place& p, size_t count) { return Segments{{kReduced, times(count, p.rank), count}}; }},
    {"scatter_perf", moecclOpScatter, false, true, kChecked, perf::factor_others, scattered,
     [](const Call& c) { return moecclScatter(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); },
     [](const Place& p, size_t count) { return Segments{{p.root, times(count, p.rank), count}}; }},
    {"sendrecv_perf", moecclOpSendRecv, false, false, kTimed, perf::factor_one, equal, send_around,
     [](const Place& p, size_t count) { return Segments{{before(p.rank, p.n_ranks), 0, count}}; }},
};
// clang-format on

}  // namespace

int main(int argc, char** argv) {
  for (const Collective& c : kCollectives)
    if (std::strcmp(c.program, perf::kPlainProgram) == 0) return perf::perf_main(argc, argv, c);
  return 1;
}
