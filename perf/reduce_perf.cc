#include "perf/common/collective.h"

namespace {

using perf::Call, perf::Place, perf::Segment, perf::Shape;

Shape shape(size_t elements, size_t, int) { return {.send = elements, .recv = elements, .count = elements}; }

moecclResult_t run(const Call& c) {
  return moecclReduce(c.send, c.recv, c.count, c.type, c.op, c.root, c.comm, c.stream);
}

std::vector<Segment> expected(const Place& place, size_t count) {
  if (place.rank != place.root) return {};
  return {{perf::kReduced, 0, count}};
}

constexpr perf::Collective kCollective = {
    .program = "reduce_perf",
    .op = moecclOpReduce,
    .reduces = true,
    .rooted = true,
    .in_place = true,
    .bus_factor = perf::factor_one,
    .shape = shape,
    .run = run,
    .expected = expected,
};

}  // namespace

int main(int argc, char** argv) { return perf::perf_main(argc, argv, kCollective); }
