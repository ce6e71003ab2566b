#include "perf/common/collective.h"

namespace {

using perf::Call, perf::Place, perf::Segment, perf::Shape;

Shape shape(size_t elements, size_t, int) { return {.send = elements, .recv = elements, .count = elements}; }

moecclResult_t run(const Call& c) { return moecclAllReduce(c.send, c.recv, c.count, c.type, c.op, c.comm, c.stream); }

std::vector<Segment> expected(const Place&, size_t count) { return {{perf::kReduced, 0, count}}; }

constexpr perf::Collective kCollective = {
    .program = "all_reduce_perf",
    .op = moecclOpAllReduce,
    .reduces = true,
    .rooted = false,
    .in_place = true,
    .bus_factor = [](int n_ranks) { return 2 * perf::factor_others(n_ranks); },
    .shape = shape,
    .run = run,
    .expected = expected,
};

}  // namespace

int main(int argc, char** argv) { return perf::perf_main(argc, argv, kCollective); }
