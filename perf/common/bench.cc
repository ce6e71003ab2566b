// SPDX-License-Identifier: Apache-2.0
#include "perf/common/bench.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "perf/common/fail.h"
#include "perf/common/gpu.h"
#include "perf/common/stats.h"

namespace perf {
namespace {

// Lies behind every receive buffer, to catch writes past its end.
constexpr size_t kGuardBytes = 64;
constexpr char kUntouched = '\x5a';

Reduction reduction_of(const Case& c, int n_ranks, uint64_t seed) {
  return {.type = c.type, .op = c.op, .n_ranks = n_ranks, .seed = seed};
}

uint64_t guard_wrong(const char* guard) {
  return std::any_of(guard, guard + kGuardBytes, [](char byte) { return byte != kUntouched; }) ? 1 : 0;
}

}  // namespace

struct Bench::Member {
  Buffer send, recv;
  moecclStream_t stream = nullptr;
  void* registered[2] = {};
  // The operator that was created for the running case, with kMulSum only.
  bool has_op = false;
  moecclRedOp_t op = moecclSum;
};

Bench::Bench(const Options& options, const Collective& collective, const Team& team, size_t buffer_bytes,
             Progress* progress)
    : options_(options), collective_(collective), team_(team), buffer_bytes_(buffer_bytes), progress_(progress) {
  const size_t bytes = buffer_bytes_ + static_cast<size_t>(options.unalign) * 8 + kGuardBytes;
  for (size_t i = 0; i < team_.size(); i++) {
    Member m;
    use_device(i);
    m.send = Buffer(bytes, options.job.memory);
    m.recv = Buffer(bytes, options.job.memory);
    if (options.job.on_cuda())
      m.stream = static_cast<moecclStream_t>(gpu::make_stream());
    else if (options.on_stream)
      check(moecclStreamCreate(&m.stream), "moecclStreamCreate", team_.rank(i));
    if (options.local_register > 0) {
      check(moecclCommRegister(team_.comm(i), m.send.data(), bytes, &m.registered[0]), "moecclCommRegister",
            team_.rank(i), team_.comm(i));
      check(moecclCommRegister(team_.comm(i), m.recv.data(), bytes, &m.registered[1]), "moecclCommRegister",
            team_.rank(i), team_.comm(i));
    }
    members_.push_back(std::move(m));
  }
}

Bench::~Bench() {
  for (size_t i = 0; i < members_.size(); i++) {
    for (void* handle : members_[i].registered)
      if (handle != nullptr) (void)moecclCommDeregister(team_.comm(i), handle);
    if (members_[i].stream == nullptr) continue;
    if (!options_.job.on_cuda()) {
      (void)moecclStreamDestroy(members_[i].stream);
      continue;
    }
    use_device(i);
    gpu::end_stream(members_[i].stream);
    members_[i].send = Buffer();
    members_[i].recv = Buffer();
  }
}

void Bench::use_device(size_t i) const {
  if (options_.job.on_cuda()) gpu::use(team_.job_rank(i));
}

Shape Bench::shape(const Case& c) const {
  const size_t element = data_type(c.type).bytes;
  return collective_.shape(c.size / element, element, team_.n_ranks());
}

Line Bench::describe(const Case& c) const {
  const Shape s = shape(c);
  Line line;
  line.bytes = std::max(s.send, s.recv) * data_type(c.type).bytes;
  // A matrix of AllToAllv has no count of its own.
  line.count = s.count > 0 ? s.count : std::max(s.send, s.recv);
  line.type = data_type(c.type).nccl_name;
  line.op = collective_.reduces ? red_op_name(c.op) : "none";
  line.root = collective_.rooted ? c.root : -1;
  return line;
}

char* Bench::recv_at(const Case& c, size_t i, bool in_place, size_t shift) const {
  const size_t element = data_type(c.type).bytes;
  const size_t offset = in_place ? shape(c).recv_in_place * static_cast<size_t>(team_.rank(i)) : 0;
  return members_[i].recv.data() + (static_cast<size_t>(options_.unalign) + offset) * element + shift;
}

char* Bench::send_at(const Case& c, size_t i, bool in_place, size_t shift) const {
  const size_t element = data_type(c.type).bytes;
  const size_t offset = in_place ? shape(c).send_in_place * static_cast<size_t>(team_.rank(i)) : 0;
  const Buffer& buffer = in_place ? members_[i].recv : members_[i].send;
  return buffer.data() + (static_cast<size_t>(options_.unalign) + offset) * element + shift;
}

moecclRedOp_t Bench::red_op(const Case& c, size_t i) {
  switch (c.op) {
    case RedOp::kSum:
      return moecclSum;
    case RedOp::kProd:
      return moecclProd;
    case RedOp::kMax:
      return moecclMax;
    case RedOp::kMin:
      return moecclMin;
    case RedOp::kAvg:
      return moecclAvg;
    case RedOp::kMulSum:
      break;
  }
  Member& m = members_[i];
  if (!m.has_op) {
    char scalar[8] = {};
    store(data_type(c.type), premul_scalar(team_.rank(i)), scalar);
    check(moecclRedOpCreatePreMulSum(&m.op, scalar, c.type, team_.comm(i)), "moecclRedOpCreatePreMulSum", team_.rank(i),
          team_.comm(i));
    m.has_op = true;
  }
  return m.op;
}

void Bench::drop_operators() {
  for (size_t i = 0; i < members_.size(); i++) {
    if (!members_[i].has_op) continue;
    check(moecclRedOpDestroy(members_[i].op, team_.comm(i)), "moecclRedOpDestroy", team_.rank(i), team_.comm(i));
    members_[i].has_op = false;
  }
}

// Successive iterations use successive parts of the buffers, as in nccl-tests, so that small sizes do not profit from
// caches.
void Bench::issue(const Case& c, bool in_place, size_t iteration) {
  const Shape s = shape(c);
  const size_t bytes = std::max(s.send, s.recv) * data_type(c.type).bytes;
  const size_t steps = bytes == 0 ? 1 : std::max<size_t>(1, buffer_bytes_ / bytes);
  const size_t shift = bytes * (iteration % steps);
  const int n_rounds = collective_.rounds == nullptr ? 1 : collective_.rounds(team_.n_ranks());
  for (int round = 0; round < n_rounds; round++)
    team_.each(collective_.program, [&](size_t i) {
      const Call call = {.send = send_at(c, i, in_place, shift),
                         .recv = recv_at(c, i, in_place, shift),
                         .count = s.count,
                         .type = c.type,
                         .op = collective_.reduces ? red_op(c, i) : moecclSum,
                         .root = c.root,
                         .rank = team_.rank(i),
                         .n_ranks = team_.n_ranks(),
                         .round = round,
                         .comm = team_.comm(i),
                         .stream = members_[i].stream};
      use_device(i);
      return collective_.run(call);
    });
}

void Bench::wait() {
  for (size_t i = 0; i < members_.size(); i++) {
    if (members_[i].stream == nullptr) continue;
    if (options_.job.on_cuda()) {
      use_device(i);
      gpu::synchronize(members_[i].stream);
      check_async(i);
    } else {
      check(moecclStreamSynchronize(members_[i].stream), "moecclStreamSynchronize", team_.rank(i), team_.comm(i));
    }
  }
}

// Asks for an asynchronous error, because a CUDA stream goes on after a failed operation.
void Bench::check_async(size_t i) const {
  moecclResult_t state = moecclSuccess;
  check(moecclCommGetAsyncError(team_.comm(i), &state), "moecclCommGetAsyncError", team_.rank(i), team_.comm(i));
  if (state != moecclInProgress) check(state, collective_.program, team_.rank(i), team_.comm(i));
}

void Bench::warm_up(const Case& c) {
  for (int i = 0; i < options_.warmup_iters; i++) issue(c, false, static_cast<size_t>(i));
  wait();
  drop_operators();
}

Bench::Samples Bench::time_iterations(const Case& c, bool in_place) {
  if (options_.cuda_graph > 0) return time_graph(c, in_place);
  const size_t n_agg = static_cast<size_t>(options_.agg_iters);
  const bool samples = options_.samples();
  Samples s;
  double excluded_us = 0;  // barriers that -z 3 does not count
  const std::string what = describe(c).type + " " + std::to_string(c.size) + " bytes";
  team_.barrier();
  const auto start = Clock::now();
  for (int iteration = 0; iteration < options_.iters; iteration++) {
    const auto iteration_start = Clock::now();
    if (n_agg > 1) check(moecclGroupStart(), "moecclGroupStart");
    for (size_t a = 0; a < n_agg; a++) {
      issue(c, in_place, static_cast<size_t>(iteration) * n_agg + a);
      if (options_.blocking == 1 || options_.blocking == 2) wait();
      if (options_.blocking == 1 && n_agg == 1) team_.barrier();
    }
    if (n_agg > 1) check(moecclGroupEnd(), collective_.program, team_.rank(0), team_.comm(0));
    // A sample needs the end of its iteration, so wait for it.
    if (options_.blocking == 3 || samples) wait();
    if (samples) s.iteration_us.push_back(since_us(iteration_start) / static_cast<double>(n_agg));
    if (options_.blocking == 3) {
      const auto barrier_start = Clock::now();
      team_.barrier();
      excluded_us += since_us(barrier_start);
    }
    if (progress_ != nullptr && (iteration & 15) == 0) progress_->show(what, iteration, options_.iters);
  }
  if (options_.cpu_time) s.total_us = since_us(start) - excluded_us;
  wait();
  if (!options_.cpu_time) s.total_us = since_us(start) - excluded_us;
  s.total_us /= static_cast<double>(options_.iters) * static_cast<double>(n_agg);
  if (progress_ != nullptr) progress_->clear();
  return s;
}

// Captures all iterations in one graph per rank and replays it -G times, as nccl-tests does.
Bench::Samples Bench::time_graph(const Case& c, bool in_place) {
  const auto on_each = [&](const auto& body) {
    for (size_t i = 0; i < members_.size(); i++) {
      use_device(i);
      body(i, static_cast<void*>(members_[i].stream));
    }
  };
  std::vector<void*> graphs(members_.size());
  on_each([](size_t, void* stream) { gpu::begin_capture(stream); });
  for (int i = 0; i < options_.iters; i++) issue(c, in_place, static_cast<size_t>(i));
  on_each([&](size_t i, void* stream) { graphs[i] = gpu::end_capture(stream); });
  const auto replay = [&] { on_each([&](size_t i, void* stream) { gpu::launch_graph(graphs[i], stream); }); };
  replay();  // warms up
  wait();
  team_.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < options_.cuda_graph; i++) replay();
  wait();
  Samples s;
  s.total_us = since_us(start) / options_.iters / options_.cuda_graph;
  for (void* graph : graphs) gpu::end_graph(graph);
  return s;
}

void Bench::combine(Samples& s) const {
  switch (options_.average) {
    case Average::kRank0:
      break;  // rank 0 prints its own
    case Average::kAverage:
      s.total_us = team_.combine({s.total_us}, moecclSum)[0] / team_.n_job_ranks();
      break;
    case Average::kMin:
      s.total_us = team_.combine({s.total_us}, moecclMin)[0];
      break;
    case Average::kMax:
      s.total_us = team_.combine({s.total_us}, moecclMax)[0];
      break;
  }
  if (s.iteration_us.empty()) return;
  if (options_.per_iter_timing) s.process_us = by_process(s.iteration_us);
  s.iteration_us = team_.combine(s.iteration_us, moecclMax);
}

// Returns [processes][iterations]: the slowest rank of each process. Empty with one process.
std::vector<std::vector<double>> Bench::by_process(const std::vector<double>& us) const {
  const size_t n_ranks = static_cast<size_t>(team_.n_job_ranks()), bytes = us.size() * sizeof(double);
  const size_t n_local = static_cast<size_t>(options_.job.threads) * static_cast<size_t>(options_.job.per_thread);
  if (n_local >= n_ranks) return {};
  std::vector<char> mine(team_.size() * bytes);
  for (size_t i = 0; i < team_.size(); i++) std::memcpy(mine.data() + i * bytes, us.data(), bytes);
  const std::vector<char> all = team_.gather(mine, bytes);
  std::vector<std::vector<double>> slowest(n_ranks / n_local, std::vector<double>(us.size()));
  std::vector<double> of_rank(us.size());
  for (size_t r = 0; r < n_ranks; r++) {
    std::memcpy(of_rank.data(), all.data() + r * bytes, bytes);
    std::vector<double>& row = slowest[r / n_local];
    for (size_t i = 0; i < row.size(); i++) row[i] = std::max(row[i], of_rank[i]);
  }
  return slowest;
}

Measured Bench::measure(const Case& c, bool in_place) {
  Measured m;
  // Verify before timing, so that wrong results are never timed silently. This also warms up this size.
  const int checks = in_place && collective_.in_place == InPlace::kTimed ? 0 : options_.check;
  if (checks > 0) m.n_wrong = 0;
  for (int i = 0; i < checks && *m.n_wrong == 0; i++) *m.n_wrong += verify(c, in_place);
  Samples s = time_iterations(c, in_place);
  combine(s);
  drop_operators();
  m.time_us = options_.report_median ? median(s.iteration_us) : s.total_us;
  const Line line = describe(c);
  const double counted = collective_.counted == nullptr ? 1 : collective_.counted(team_.n_ranks());
  m.alg_bw = m.time_us > 0 ? static_cast<double>(line.bytes) * counted / m.time_us / 1e3 : 0;
  m.bus_bw = m.alg_bw * collective_.bus_factor(team_.n_ranks());
  m.iteration_us = std::move(s.iteration_us);
  m.process_us = std::move(s.process_us);
  return m;
}

uint64_t Bench::verify(const Case& c, bool in_place) {
  seed_++;
  prepare_data(c, in_place, seed_);
  team_.barrier();
  issue(c, in_place, 0);
  wait();
  return count_wrong(c, in_place, seed_);
}

void Bench::prepare_data(const Case& c, bool in_place, uint64_t seed) {
  const Shape s = shape(c);
  const size_t element = data_type(c.type).bytes;
  const Reduction reduction = reduction_of(c, team_.n_ranks(), seed);
  for (size_t i = 0; i < members_.size(); i++) {
    const int rank = team_.rank(i);
    // Clears the whole receive buffer from its base, because in place it also holds the input.
    Member& m = members_[i];
    char* const recv = recv_at(c, i, false, 0);
    const size_t recv_bytes = std::max(s.send, s.recv) * element + kGuardBytes;
    std::memset(m.recv.host(recv), kUntouched, recv_bytes);
    const Pattern pattern =
        collective_.reduces ? reduction_input(reduction, rank) : random_pattern(element, seed, rank);
    Buffer& from = in_place ? m.recv : m.send;
    char* const send = send_at(c, i, in_place, 0);
    pattern.fill(from.host(send), 0, s.send);
    use_device(i);
    m.recv.push(recv, recv_bytes);
    if (!in_place) from.push(send, s.send * element);
  }
}

uint64_t Bench::count_wrong(const Case& c, bool in_place, uint64_t seed) {
  const Shape s = shape(c);
  const size_t element = data_type(c.type).bytes;
  std::vector<std::pair<int, Pattern>> sources;  // made once for all segments and ranks
  const auto pattern_of = [&](int source) -> const Pattern& {
    for (const auto& known : sources)
      if (known.first == source) return known.second;
    sources.emplace_back(source, source == kReduced ? reduction_result(reduction_of(c, team_.n_ranks(), seed))
                                                    : random_pattern(element, seed, source));
    return sources.back().second;
  };
  std::vector<uint64_t> wrong(members_.size());
  for (size_t i = 0; i < members_.size(); i++) {
    const Place place = {.rank = team_.rank(i), .n_ranks = team_.n_ranks(), .root = c.root, .element_bytes = element};
    Buffer& recv = members_[i].recv;
    use_device(i);
    recv.pull(recv_at(c, i, false, 0), std::max(s.send, s.recv) * element + kGuardBytes);
    const char* at = recv.host(recv_at(c, i, in_place, 0));
    for (const Segment& segment : collective_.expected(place, s.count)) {
      wrong[i] += pattern_of(segment.source).count_wrong(at, segment.first, segment.count);
      at += segment.count * element;
    }
    wrong[i] += guard_wrong(recv.host(recv_at(c, i, false, 0) + std::max(s.send, s.recv) * element));
  }
  return team_.sum(wrong);
}

}  // namespace perf
