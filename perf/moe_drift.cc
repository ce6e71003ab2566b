// SPDX-License-Identifier: Apache-2.0
// Measures whether `auto` follows when the best plan of a layer changes. One layer takes the same shape step after step
// on a paced (EMULATED) tree, through three phases; the middle one has another best plan than the first and the last.
// `auto` and each forced plan run every step in turn. The oracle is each phase's best forced plan, from the phase's
// first step on. By default the routing changes; with --load it stays, and another job takes the outermost uplink,
// which no price can know. The exit status is 0 when the limits hold, and 1 when one does not or when the trace shows
// nothing because keeping the plan would have cost too little. See --help and docs/performance.md.
#include <moeccl/collectives.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "perf/common/fail.h"
#include "perf/common/pattern.h"
#include "perf/common/routing.h"
#include "perf/common/shared_options.h"
#include "perf/common/text.h"
#include "perf/moe/drift.h"
#include "perf/moe/moe_bench.h"

namespace perf {
namespace {

constexpr size_t kPool = 16;  // routings of a phase, which steps take in turn, so that no two neighbours are the same
constexpr const char* kRoutingTree = "node:2(bw=0.06GB/s,lat=2ms) gpu:4(bw=1GB/s,lat=2ms)";
constexpr const char* kLoadTree = "node:2(bw=0.1GB/s,lat=200us) gpu:4(bw=0.14GB/s,lat=200us)";

struct Options {
  MoeOptions moe;
  int steps = 100;
  bool load = false, report_only = false;
  size_t load_bytes = size_t{2} << 20;
  std::string json_file, plot_file;
};

Options parse(int argc, char** argv) {
  Options o;
  o.moe.top_k = 8;
  o.moe.n_experts = 64;
  o.moe.hidden = 2048;
  App app(
      "Measures how fast `auto` follows when the best plan of a MoE layer changes twice, on a paced (EMULATED) tree",
      "moe_drift");
  app.add_flag("--load", o.load, "the routing stays; in the middle phase another job loads two ranks' own links");
  app.add_option("--steps", o.steps, "of each of the three phases")->check(range(2, 100000))->capture_default_str();
  app.add_option("--topology", o.moe.job.topology,
                 std::string("two levels of 8 ranks (") + kRoutingTree + "; with --load " + kLoadTree + ")");
  auto* tokens = app.add_option("--tokens", o.moe.tokens, "tokens per rank (16)");
  app.add_option("--hidden", o.moe.hidden, "elements of a row");
  app.add_option("--topk", o.moe.top_k, "experts per token")->check(range(1, 32))->capture_default_str();
  app.add_option("--experts", o.moe.n_experts, "routed experts, a multiple of 8")->capture_default_str();
  app.add_option("--load-bytes", o.load_bytes, "of each message of the other job")->capture_default_str();
  app.add_option("--seed", o.moe.seed, "of the routings")->check(not_negative())->capture_default_str();
  app.add_flag("--report-only", o.report_only, "end with 0 even where a limit does not hold");
  add_output(app, "-J,--output_file", o.json_file, "write results as JSON");
  add_output(app, "--plot", o.plot_file, "draw them (SVG)");
  parse_or_exit(app, argc, argv);
  if (o.moe.job.topology.empty()) o.moe.job.topology = o.load ? kLoadTree : kRoutingTree;
  if (tokens->empty()) o.moe.tokens = 16;
  o.moe.job.procs = 8;
  o.moe.job.pace = true;
  if (o.moe.n_experts % 8 != 0 || o.moe.n_experts / 2 < o.moe.top_k)
    fail("--experts " + std::to_string(o.moe.n_experts) + ": use a multiple of 8, twice --topk or more");
  return o;
}

// Tokens choose among all experts or among those of their own node.
std::vector<std::vector<int32_t>> routings(const MoeOptions& o, int rank, bool local) {
  std::vector<std::vector<int32_t>> pool;
  const int half = o.n_experts / 2;
  for (size_t i = 0; i < kPool; i++) {
    const uint64_t seed = mix(o.seed, static_cast<uint64_t>(rank), i + (local ? kPool : 0));
    pool.push_back(uniform_topk({o.tokens, o.top_k, local ? half : o.n_experts}, seed));
    if (local && rank >= o.job.procs / 2)
      for (int32_t& e : pool.back()) e += half;
  }
  return pool;
}

// Another job on the tree: while it is on, rank 0 and the first rank of the other node send to each other without a
// pause, in a separate class that goes first.
class Load {
 public:
  // Collective.
  Load(const Team& team, size_t bytes) : rank_(team.rank(0)), in_(bytes), out_(bytes) {
    const bool takes_part = rank_ < 2;
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.pace = 1;
    config.priority = MOECCL_HIGHEST_PRIORITY;
    config.name = "load";
    check(moecclCommSplit(team.comm(0), takes_part ? 0 : -1, rank_, &comm_, &config), "moecclCommSplit", rank_,
          team.comm(0));
    if (takes_part) thread_ = std::thread([this] { run(); });
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;
  ~Load() {
    wanted_.store(-1);
    if (thread_.joinable()) thread_.join();
    if (comm_ != nullptr) (void)moecclCommDestroy(comm_);
  }
  // Call this in the same order on all ranks.
  void set(bool on) {
    if (on != (wanted_.load() % 2 == 1)) wanted_.fetch_add(1);
  }
  // Returns the GB/s in each direction while it was on, or 0 on ranks that take no part.
  double rate() const { return on_ns_ == 0 ? 0 : static_cast<double>(bytes_) / static_cast<double>(on_ns_); }

 private:
  // Odd values of wanted_ are times of load. Rank 0 ends such a time, and tells the other rank in its last message.
  void run() {
    for (int64_t time = 1;; time += 2) {
      while (wanted_.load() < time) {
        if (wanted_.load() < 0) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      const auto start = Clock::now();
      for (bool goes_on = true; goes_on; bytes_ += out_.size()) {
        out_[0] = wanted_.load() == time;
        const int peer = rank_ == 0 ? 1 : 0;
        check(moecclGroupStart(), "moecclGroupStart");
        check(moecclSend(out_.data(), out_.size(), moecclUint8, peer, comm_, nullptr), "moecclSend", rank_, comm_);
        check(moecclRecv(in_.data(), in_.size(), moecclUint8, peer, comm_, nullptr), "moecclRecv", rank_, comm_);
        check(moecclGroupEnd(), "moecclGroupEnd", rank_, comm_);
        goes_on = (rank_ == 0 ? out_[0] : in_[0]) != 0;
      }
      on_ns_ += std::chrono::nanoseconds(Clock::now() - start).count();
    }
  }

  int rank_;
  moecclComm_t comm_ = nullptr;
  std::vector<uint8_t> in_, out_;
  std::atomic<int64_t> wanted_ = 0;  // -1: end
  std::atomic<uint64_t> bytes_ = 0;
  std::atomic<int64_t> on_ns_ = 0;
  std::thread thread_;
};

class Drift {
 public:
  Drift(const Options& o, const Team& team) : options_(o), team_(team) {
    pools_.push_back(routings(o.moe, team.rank(0), false));
    pools_.push_back(routings(o.moe, team.rank(0), !o.load));
    owner_ = contiguous_owners(o.moe.n_experts, team.n_ranks());
    const size_t row = o.moe.hidden * data_type(o.moe.type).bytes;
    tokens_ = Buffer(o.moe.tokens * row, Memory::kHeap);
    // The most rows that any routing delivers: every choice of every token.
    rows_ = Buffer(o.moe.tokens * static_cast<size_t>(team.n_ranks() * o.moe.top_k) * row, Memory::kHeap);
    for (const char* plan : {"auto", "flat", "2dh", "hier:1", "hier:2"}) {
      Layer l;
      l.moe = create_layer(o.moe, owner_, o.moe.tokens, plan, team);
      const std::vector<int32_t>& first = pools_[0][0];
      check(moecclRoutingCreate(&l.routing, l.moe, first.data(), nullptr, o.moe.tokens), "moecclRoutingCreate",
            team.rank(0), team.comm(0));
      layers_.push_back(l);
      if (layers_.size() > 1) trace_.plans.emplace_back(plan);
    }
    if (o.load) load_ = std::make_unique<Load>(team, o.load_bytes);
    trace_.phases = o.load ? std::vector<std::string>{"idle links", "loaded links", "idle links again"}
                           : std::vector<std::string>{"spread routing", "routing within nodes", "spread routing again"};
  }
  ~Drift() {
    for (const Layer& l : layers_) {
      (void)moecclRoutingDestroy(l.routing);
      (void)moecclMoeDestroy(l.moe);
    }
  }
  Drift(const Drift&) = delete;
  Drift& operator=(const Drift&) = delete;

  double load_rate() const { return load_ == nullptr ? 0 : load_->rate(); }

  DriftTrace run(Progress* progress) {
    for (size_t phase = 0; phase < trace_.phases.size(); phase++) {
      if (load_ != nullptr) load_->set(phase == 1);
      for (int i = 0; i < options_.steps; i++) {
        step(phase);
        if (progress != nullptr)
          progress->show(trace_.phases[phase], static_cast<double>(trace_.steps.size()),
                         static_cast<double>(trace_.phases.size()) * options_.steps);
      }
    }
    share();
    if (progress != nullptr) progress->clear();
    return std::move(trace_);
  }

 private:
  struct Layer {
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
  };

  // The first layer changes from step to step, so that none always follows the same one.
  void step(size_t phase) {
    const size_t number = trace_.steps.size(), n = layers_.size();
    const std::vector<int32_t>& index = pools_[phase % 2][number % kPool];
    DriftStep s;
    s.phase = phase;
    s.forced_us.resize(n - 1);
    for (size_t turn = 0; turn < n; turn++) {
      const size_t at = (turn + number) % n;
      const double us = time(layers_[at], index);
      if (at == 0) {
        moecclRoutingInfo_t info = {};
        info.size = sizeof info;
        demand(moecclRoutingGetInfo(layers_[0].routing, &info), "moecclRoutingGetInfo");
        s.auto_us = us;
        s.plan = info.algorithm;
      } else {
        s.forced_us[at - 1] = us;
      }
    }
    trace_.steps.push_back(std::move(s));
  }

  // Times dispatch and combine. The time of an update is nearly the same for all plans.
  double time(const Layer& l, const std::vector<int32_t>& index) {
    demand(moecclRoutingUpdate(l.routing, index.data(), nullptr, options_.moe.tokens), "moecclRoutingUpdate");
    return team_.timed_us([&] {
      demand(moecclDispatch(l.routing, tokens_.data(), rows_.data(), nullptr), "moecclDispatch");
      demand(moecclCombine(l.routing, rows_.data(), tokens_.data(), nullptr), "moecclCombine");
    });
  }

  // Replaces each rank's times by those of the slowest one.
  void share() {
    std::vector<double> us;
    for (const DriftStep& s : trace_.steps) {
      us.push_back(s.auto_us);
      us.insert(us.end(), s.forced_us.begin(), s.forced_us.end());
    }
    us = team_.combine(us, moecclMax);
    size_t at = 0;
    for (DriftStep& s : trace_.steps) {
      s.auto_us = us[at++];
      for (double& forced : s.forced_us) forced = us[at++];
    }
  }

  void demand(moecclResult_t result, const char* call) const { check(result, call, team_.rank(0), team_.comm(0)); }

  const Options& options_;
  const Team& team_;
  std::vector<std::vector<std::vector<int32_t>>> pools_;  // [spread, the other], of this rank
  std::vector<int32_t> owner_;
  Buffer tokens_, rows_;
  std::vector<Layer> layers_;  // auto first
  std::unique_ptr<Load> load_;
  DriftTrace trace_;
};

int report(const Options& o, const std::string& command, const DriftTrace& trace, double load_rate) {
  const DriftSummary s = summarize(trace);
  std::printf(
      "# moe_drift: 8 ranks of %zu tokens, top-%d of %d experts, %d steps a phase, %s changes\n"
      "# EMULATED: links are paced to %s\n# us: dispatch + combine of the slowest rank\n",
      o.moe.tokens, o.moe.top_k, o.moe.n_experts, o.steps, o.load ? "the links' load" : "the routing",
      o.moe.job.topology.c_str());
  if (o.load) std::printf("# load: %.3f GB/s each way between ranks 0 and 1\n", load_rate);
  for (size_t i = 0; i < s.phases.size(); i++) {
    const DriftPhase& p = s.phases[i];
    std::printf("phase %zu  %-22s best %-7s %9.1f us", i + 1, p.name.c_str(), p.best.c_str(), p.best_us);
    if (i > 0) std::printf("  the plan before: %.2f times that", p.keeping);
    if (p.followed_in < 0)
      std::printf("  auto never followed");
    else
      std::printf("  auto followed in %d steps", p.followed_in);
    std::printf("  auto / oracle %.3f\n#   forced:", p.auto_us / p.oracle_us);
    for (size_t f = 0; f < p.forced_us.size(); f++) std::printf(" %s %.1f", trace.plans[f].c_str(), p.forced_us[f]);
    std::printf("\n#   auto ran");
    for (size_t at = p.first, n = 0; at < p.first + p.n_steps; at += n) {
      for (n = 1; at + n < p.first + p.n_steps && trace.steps[at + n].plan == trace.steps[at].plan;) n++;
      std::printf(" %s x%zu", trace.steps[at].plan.c_str(), n);
    }
    std::printf("\n");
  }
  for (const std::string& sentence : s.broken) std::printf("# FAILED: %s\n", sentence.c_str());
  if (!s.shows)
    std::printf("# SHOWS NOTHING: keeping the plan of the phase before costs less than %.2f times\n", kDiffers);
  std::printf("drift over_oracle=%.4f followed_in=%d,%d %s\n", s.over_oracle, s.phases[1].followed_in,
              s.phases[2].followed_in,
              !s.shows           ? "shows nothing"
              : s.broken.empty() ? "ok"
                                 : "failed");
  write_or_fail({{o.json_file, drift_json(command, trace, s)},
                 {o.plot_file, drift_plot("A layer whose best plan changes", trace, s)}});
  return (o.report_only || (s.shows && s.broken.empty())) ? 0 : 1;
}

int moe_drift_main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  const std::string command = command_line(argc, argv);
  Job job(o.moe.job);
  int status = 0;
  job.run(true, [&](int, const Team& team) {
    Progress progress(job.leads());
    Drift drift(o, team);
    const DriftTrace trace = drift.run(job.leads() ? &progress : nullptr);
    if (job.leads()) status = report(o, command, trace, drift.load_rate());
  });
  return status;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::moe_drift_main(argc, argv); }
