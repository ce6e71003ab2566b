#include "perf/common/collective.h"

namespace {

using perf::Call, perf::Place, perf::Segment, perf::Shape;

Shape shape(size_t elements, size_t, int) { return {.send = elements, .recv = elements, .count = elements}; }

moecclResult_t run(const Call& c) { return moecclBroadcast(c.send, c.recv, c.count, c.type, c.root, c.comm, c.stream); }

std::vector<Segment> expected(const Place& place, size_t count) { return {{place.root, 0, count}}; }

constexpr perf::Collective kCollective = {
    .program = "broadcast_perf",
    .op = moecclOpBroadcast,
    .reduces = false,
    .rooted = true,
    .in_place = true,
    .bus_factor = perf::factor_one,
    .shape = shape,
    .run = run,
    .expected = expected,
};

}  // namespace

int main(int argc, char** argv) { return perf::perf_main(argc, argv, kCollective); }
