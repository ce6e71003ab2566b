#include "perf/common/collective.h"

namespace {

using perf::Call, perf::Place, perf::Segment, perf::Shape;

Shape shape(size_t elements, size_t, int) { return {.send = elements, .recv = elements, .count = elements}; }

// A ring: to the next rank, from the one before.
moecclResult_t run(const Call& c) {
  const int next = (c.rank + 1) % c.n_ranks, previous = (c.rank + c.n_ranks - 1) % c.n_ranks;
  moecclResult_t result = moecclGroupStart();
  if (result != moecclSuccess) return result;
  const moecclResult_t sent = moecclSend(c.send, c.count, c.type, next, c.comm, c.stream);
  const moecclResult_t received = moecclRecv(c.recv, c.count, c.type, previous, c.comm, c.stream);
  result = moecclGroupEnd();
  if (sent != moecclSuccess) return sent;
  return received != moecclSuccess ? received : result;
}

std::vector<Segment> expected(const Place& place, size_t count) {
  return {{(place.rank + place.n_ranks - 1) % place.n_ranks, 0, count}};
}

constexpr perf::Collective kCollective = {
    .program = "sendrecv_perf",
    .op = moecclOpSendRecv,
    .reduces = false,
    .rooted = false,
    .in_place = false,
    .bus_factor = perf::factor_one,
    .shape = shape,
    .run = run,
    .expected = expected,
};

}  // namespace

int main(int argc, char** argv) { return perf::perf_main(argc, argv, kCollective); }
