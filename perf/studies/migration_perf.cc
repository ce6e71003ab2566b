// SPDX-License-Identifier: Apache-2.0
// Measures migration of experts (HybridEP): the work that remains for the caller when a gather has ended, how well the
// experts' computation hides decoding (Fig. 15 b), and how much of a long line gather, reduce and dispatch use. Paced
// links: EMULATED.
#include <moeccl/moeccl.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "perf/common/fail.h"
#include "perf/common/job.h"
#include "perf/common/shared_options.h"
#include "perf/common/team.h"

namespace perf {
namespace {

struct Options {
  JobOptions job;
  std::string what = "wait", line = "dc:2(bw=1.25GB/s,lat=20ms) gpu:1";
  size_t expert_bytes = 4 << 20, line_bytes = 512 << 20;
  int experts = 8, iters = 5;
  double line_bytes_per_s = 1.25e9;
};

void tell(const std::string& item, double ours, const nlohmann::json& more) {
  nlohmann::json line = {{"paper", "HybridEP"}, {"item", item}, {"ours", ours}, {"how", "run"}};
  line.update(more);
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

// ---- Decoding ----

class Decoding {
 public:
  Decoding(const Team& team, const Options& o) : team_(team), o_(o), count_(o.expert_bytes / sizeof(float)) {
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    const int32_t domain = team.n_ranks();
    config.n_experts = o.experts;
    config.n_levels = 1;
    config.domain = &domain;
    check(moecclHybridCreate(&hybrid_, team.comm(0), &config), "moecclHybridCreate", team.rank(0), team.comm(0));
    info_.size = sizeof(info_);
    check(moecclHybridGetInfo(hybrid_, &info_), "moecclHybridGetInfo", team.rank(0));
    moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
    migrate.count = count_;
    check(moecclMigrationCreate(&migration_, hybrid_, nullptr, &migrate), "moecclMigrationCreate", team.rank(0),
          team.comm(0));
    shared_.assign(count_, 0.5f);
    held_.resize(static_cast<size_t>(info_.n_held) * count_);
    for (size_t i = 0; i < static_cast<size_t>(info_.n_own) * count_; i++)
      own_.push_back(0.5f + 0.01f * static_cast<float>((i * 2654435761u) % 997) / 997);
  }
  ~Decoding() {
    (void)moecclMigrationDestroy(migration_);
    (void)moecclHybridDestroy(hybrid_);
  }
  Decoding(const Decoding&) = delete;
  Decoding& operator=(const Decoding&) = delete;

  void begin(bool into) {
    team_.barrier();
    check(moecclMigrationSend(migration_, 0, own_.data(), shared_.data(), nullptr), "moecclMigrationSend", 0);
    check(into ? moecclMigrationBeginInto(migration_, 0, shared_.data(), held_.data())
               : moecclMigrationBegin(migration_, 0),
          "moecclMigrationBegin", 0, team_.comm(0));
  }
  void until_done() {
    for (int done = 0; done == 0; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      check(moecclMigrationTest(migration_, 0, &done), "moecclMigrationTest", 0);
  }
  void wait() {
    check(moecclMigrationWait(migration_, 0, shared_.data(), held_.data(), nullptr), "moecclMigrationWait", 0,
          team_.comm(0));
  }
  // Computes with expert h: passes over its weights until it has taken as long as `passes` of them.
  float compute(int h, int passes) {
    const float* w = &held_[static_cast<size_t>(h) * count_];
    float sum[8] = {};
    for (int p = 0; p < passes; p++)
      for (size_t i = 0; i + 8 <= count_; i += 8)
        for (size_t j = 0; j < 8; j++) sum[j] += w[i + j] * (1.0f + static_cast<float>(p));
    return sum[0] + sum[7];
  }
  struct Times {
    double wait_decodes_ms = 0, wait_after_ms = 0, compute_ms = 0, serial_ms = 0, beside_ms = 0;
  };
  Times run(int passes) {
    std::vector<double> t[5];
    for (int i = 0; i < o_.iters; i++) {
      begin(false);
      until_done();
      auto start = Clock::now();
      wait();
      t[0].push_back(since_ms(start));
      for (int h = 0; h < info_.n_held; h++) keep_ += compute(h, passes);
      t[3].push_back(since_ms(start));
      start = Clock::now();
      for (int h = 0; h < info_.n_held; h++) keep_ += compute(h, passes);
      t[2].push_back(since_ms(start));
      begin(true);
      until_done();
      start = Clock::now();
      wait();
      t[1].push_back(since_ms(start));
      begin(true);
      // The gather alone is short here, so time from the first expert on, as if it had ended before.
      check(moecclMigrationWaitExpert(migration_, 0, 0), "moecclMigrationWaitExpert", 0);
      start = Clock::now();
      for (int h = 0; h < info_.n_held; h++) {
        check(moecclMigrationWaitExpert(migration_, 0, h), "moecclMigrationWaitExpert", 0);
        keep_ += compute(h, passes);
      }
      const double first_ms = t[0].back() / info_.n_held;
      wait();
      t[4].push_back(since_ms(start) + first_ms);
    }
    if (keep_ == 12345.0f) std::printf("#\n");
    const auto slowest = [&](int i) { return team_.slowest(t[i]); };
    return {slowest(0), slowest(1), slowest(2), slowest(3), slowest(4)};
  }

 private:
  const Team& team_;
  const Options& o_;
  size_t count_;
  moecclHybrid_t hybrid_ = nullptr;
  moecclHybridInfo_t info_{};
  moecclMigration_t migration_ = nullptr;
  std::vector<float> shared_, own_, held_;
  float keep_ = 0;
};

void wait_times(const Options& o) {
  JobOptions job_options = o.job;
  job_options.threads = 1;
  Job job(job_options);
  job.run(true, [&](int, const Team& team) {
    Decoding d(team, o);
    const Decoding::Times t = d.run(4);
    if (team.rank(0) != 0) return;
    tell("Wait after a finished gather, share of the decoding", t.wait_after_ms / t.wait_decodes_ms,
         {{"experts", o.experts},
          {"expert_bytes", o.expert_bytes},
          {"begin_ms", t.wait_decodes_ms},
          {"begin_into_ms", t.wait_after_ms}});
    tell("Fig. 15 b, decoding beside the experts' computation: overhead that is left",
         (t.beside_ms - t.compute_ms) / (t.serial_ms - t.compute_ms),
         {{"paper_value", 0.55}, {"compute_ms", t.compute_ms}, {"serial_ms", t.serial_ms}, {"beside_ms", t.beside_ms}});
  });
}

// ---- A long line ----

void long_line(const Options& o) {
  JobOptions job_options = o.job;
  job_options.threads = 2;
  job_options.topology = o.line;
  job_options.pace = true;
  job_options.memory = Memory::kMalloc;
  Job job(job_options);
  job.run(true, [&](int, const Team& team) {
    moecclComm_t comm = team.comm(0);
    const int rank = team.rank(0);
    const auto timed = [&](const char* item, double bytes, auto&& operation) {
      std::vector<double> ms;
      for (int i = -1; i < o.iters; i++) {
        const double us = team.timed_us(operation);
        if (i >= 0) ms.push_back(us / 1e3);
      }
      const double slowest = team.slowest(ms);
      if (rank == 0)
        tell(std::string("Long line, ") + item + ", share of the line", bytes / (slowest / 1e3) / o.line_bytes_per_s,
             {{"ms", slowest}, {"bytes", bytes}, {"topology", o.line}, {"emulated", true}});
    };
    const size_t count = o.line_bytes / sizeof(float);
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    const int32_t domain[2] = {2, 1};
    config.n_experts = 2;
    config.n_levels = 2;
    config.domain = domain;
    moecclHybrid_t hybrid = nullptr;
    check(moecclHybridCreate(&hybrid, comm, &config), "moecclHybridCreate", rank, comm);
    std::vector<float> own(count, 1.0f), held(2 * count, 0.0f);
    timed("gather", static_cast<double>(o.line_bytes), [&] {
      check(moecclHybridGather(hybrid, own.data(), held.data(), o.line_bytes, nullptr), "moecclHybridGather", rank,
            comm);
    });
    timed("reduce", static_cast<double>(o.line_bytes), [&] {
      check(moecclHybridReduce(hybrid, held.data(), own.data(), count, moecclFloat32, nullptr), "moecclHybridReduce",
            rank, comm);
    });
    if (own[count - 1] != 2.0f) fail("the sum of two gradients of 1 is not 2");
    check(moecclHybridDestroy(hybrid), "moecclHybridDestroy", rank);
    moecclMoeConfig_t moe_config = MOECCL_MOE_CONFIG_INIT;
    moe_config.hidden_bytes = 8192;
    moe_config.type = moecclFloat32;
    moe_config.n_experts = moe_config.top_k = 2;  // every token goes to both ranks
    moe_config.max_tokens = o.line_bytes / moe_config.hidden_bytes;
    moecclMoe_t moe = nullptr;
    check(moecclMoeCreate(&moe, comm, &moe_config), "moecclMoeCreate", rank, comm);
    std::vector<int32_t> index;
    for (size_t t = 0; t < moe_config.max_tokens; t++) index.insert(index.end(), {0, 1});
    moecclRouting_t routing = nullptr;
    check(moecclRoutingCreate(&routing, moe, index.data(), nullptr, moe_config.max_tokens), "moecclRoutingCreate", rank,
          comm);
    timed("dispatch", static_cast<double>(o.line_bytes),
          [&] { check(moecclDispatch(routing, own.data(), held.data(), nullptr), "moecclDispatch", rank, comm); });
    check(moecclRoutingDestroy(routing), "moecclRoutingDestroy", rank);
    check(moecclMoeDestroy(moe), "moecclMoeDestroy", rank);
  });
}

int migration_main(int argc, char** argv) {
  Options o;
  o.job.threads = 0;
  App app("What migration leaves to the caller, and how full a long line is; JSON lines", "migration_perf");
  app.add_option("--what", o.what, "wait or line")->check(is_member({"wait", "line"}))->capture_default_str();
  add_size(app, "-x,--expert", o.expert_bytes, "wait: one expert (bytes)");
  app.add_option("-e,--experts", o.experts, "wait: experts that a rank decodes")->check(positive());
  add_size(app, "-b,--bytes", o.line_bytes, "line: what each rank sends (bytes)");
  app.add_option("--line", o.line, "line: topology of two data centres")->capture_default_str();
  app.add_option("--rate", o.line_bytes_per_s, "line: its bytes a second")->capture_default_str();
  app.add_option("-n,--iters", o.iters, "timed iterations")->check(positive())->capture_default_str();
  add_job_options(app, o.job, Memories::kNone);
  parse_or_exit(app, argc, argv);
  if (o.what == "wait") wait_times(o);
  if (o.what == "line") long_line(o);
  return 0;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::migration_main(argc, argv); }
