#include "perf/common/collective.h"

namespace {

using perf::Call, perf::Place, perf::Segment, perf::Shape;

Shape shape(size_t elements, size_t element_bytes, int n_ranks) {
  const size_t block = perf::block_elements(elements, element_bytes, n_ranks);
  return {.send = block, .recv = block * static_cast<size_t>(n_ranks), .count = block, .send_in_place = block};
}

moecclResult_t run(const Call& c) { return moecclGather(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); }

std::vector<Segment> expected(const Place& place, size_t count) {
  std::vector<Segment> segments;
  for (int r = 0; r < place.n_ranks && place.rank == place.root; r++) segments.push_back({r, 0, count});
  return segments;
}

constexpr perf::Collective kCollective = {
    .program = "gather_perf",
    .op = moecclOpGather,
    .reduces = false,
    .rooted = true,
    .in_place = true,
    .bus_factor = perf::factor_others,
    .shape = shape,
    .run = run,
    .expected = expected,
};

}  // namespace

int main(int argc, char** argv) { return perf::perf_main(argc, argv, kCollective); }
