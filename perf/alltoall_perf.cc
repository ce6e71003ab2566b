#include "perf/common/collective.h"

namespace {

using perf::Call, perf::Place, perf::Segment, perf::Shape;

Shape shape(size_t elements, size_t element_bytes, int n_ranks) {
  const size_t block = perf::block_elements(elements, element_bytes, n_ranks);
  const size_t all = block * static_cast<size_t>(n_ranks);
  return {.send = all, .recv = all, .count = block};
}

moecclResult_t run(const Call& c) { return moecclAllToAll(c.send, c.recv, c.count, c.type, c.comm, c.stream); }

std::vector<Segment> expected(const Place& place, size_t count) {
  std::vector<Segment> segments;
  for (int r = 0; r < place.n_ranks; r++) segments.push_back({r, static_cast<size_t>(place.rank) * count, count});
  return segments;
}

constexpr perf::Collective kCollective = {
    .program = "alltoall_perf",
    .op = moecclOpAllToAll,
    .reduces = false,
    .rooted = false,
    .in_place = true,
    .bus_factor = perf::factor_others,
    .shape = shape,
    .run = run,
    .expected = expected,
};

}  // namespace

int main(int argc, char** argv) { return perf::perf_main(argc, argv, kCollective); }
