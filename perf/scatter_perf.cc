#include "perf/common/collective.h"

namespace {

using perf::Call, perf::Place, perf::Segment, perf::Shape;

Shape shape(size_t elements, size_t element_bytes, int n_ranks) {
  const size_t block = perf::block_elements(elements, element_bytes, n_ranks);
  return {.send = block * static_cast<size_t>(n_ranks), .recv = block, .count = block, .recv_in_place = block};
}

moecclResult_t run(const Call& c) { return moecclScatter(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); }

std::vector<Segment> expected(const Place& place, size_t count) {
  return {{place.root, static_cast<size_t>(place.rank) * count, count}};
}

constexpr perf::Collective kCollective = {
    .program = "scatter_perf",
    .op = moecclOpScatter,
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
