// SPDX-License-Identifier: Apache-2.0
// Times the re-placing combine (NetMoE) against a plain combine of the same bytes, whose routing has the tokens already
// where the solver wants them. Every value is checked, and the bytes between nodes that the solver predicts are printed
// with those that the ranks' lists send.
#include <moeccl/moeccl.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "perf/common/buffer.h"
#include "perf/common/fail.h"
#include "perf/common/pattern.h"
#include "perf/common/shared_options.h"
#include "perf/common/team.h"
#include "perf/common/text.h"

namespace perf {
namespace {

using Json = nlohmann::ordered_json;

struct ReplaceOptions {
  JobOptions job;
  size_t samples = 8, sample_tokens = 32, hidden = 1024;
  int top_k = 2, n_experts = 0, iters = 20, warmup = 3;
  double locality = 0.8;
  uint64_t seed = 1;
  bool residual = false, layer = false;
  std::vector<std::string> algorithms = {"flat", "auto"};
  std::string output_file;
};

ReplaceOptions parse(int argc, char** argv) {
  ReplaceOptions o;
  App app("Times combine with re-placement of samples against a plain combine of the same bytes", "replace_perf");
  app.add_option("--samples", o.samples, "samples of a rank")->check(positive())->capture_default_str();
  app.add_option("--sample-tokens", o.sample_tokens, "tokens of a sample")->check(positive())->capture_default_str();
  app.add_option("--hidden", o.hidden, "elements of a row (float)")->check(positive())->capture_default_str();
  app.add_option("--topk", o.top_k, "experts per token")->check(range(1, 64))->capture_default_str();
  app.add_option("--experts", o.n_experts, "experts (2 a rank)")->check(range(1, 65535));
  app.add_option("--locality", o.locality, "share of a sample's choices among the experts that it likes")
      ->check(within(0, 1))
      ->capture_default_str();
  app.add_flag("--residual", o.residual, "with the residual inlined");
  app.add_flag("--layer", o.layer,
               "also whole layers in turns, plain and re-placing where it pays: update, Begin, dispatch, combine");
  app.add_option("--algo", o.algorithms, "comma list of auto, flat, 2dh, hier:D")
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--iters", o.iters, "timed iterations")->check(positive())->capture_default_str();
  app.add_option("--warmup", o.warmup, "iterations before timing")->check(not_negative())->capture_default_str();
  app.add_option("--seed", o.seed, "of the routing")->check(not_negative())->capture_default_str();
  add_output(app, "-J,--output_file", o.output_file, "write results as JSON");
  add_job_options(app, o.job, Memories::kOfHost);
  parse_or_exit(app, argc, argv);
  return o;
}

// The data of every token, which every rank knows, by the token's number over all ranks.
class Truth {
 public:
  Truth(const ReplaceOptions& o, int n_experts) : o_(o), n_experts_(static_cast<uint64_t>(n_experts)) {}
  size_t tokens_per_rank() const { return o_.samples * o_.sample_tokens; }
  // A token's experts are distinct: k steps from a start that most of a sample's tokens share.
  int32_t expert(size_t token, size_t k) const {
    const bool liked = static_cast<double>(mix(o_.seed, 1, token) % 1000) < 1000 * o_.locality;
    const uint64_t start = liked ? mix(o_.seed, 2, token / o_.sample_tokens) : mix(o_.seed, 3, token);
    return static_cast<int32_t>((start + k) % n_experts_);
  }
  float weight(size_t token, size_t k) const { return mix(o_.seed, 4 + k, token) % 2 == 0 ? 0.5f : 1.0f; }
  // Small integers, so that sums are exact in any order. They repeat along a row.
  float x(size_t token, size_t i) const { return static_cast<float>((token + i % 8 * 3) % 9) - 4; }
  float y(size_t token, int32_t e, size_t i) const {
    return static_cast<float>((token * 5 + static_cast<size_t>(e) + i % 8 * 7) % 9) - 4;
  }
  float sum(size_t token, size_t i) const {
    float s = o_.residual ? x(token, i) : 0;
    for (size_t k = 0; k < static_cast<size_t>(o_.top_k); k++) s += weight(token, k) * y(token, expert(token, k), i);
    return s;
  }

 private:
  const ReplaceOptions& o_;
  uint64_t n_experts_;
};

struct Line {
  std::string algorithm;
  double replaced_us = 0, same_bytes_us = 0, before_us = 0, begin_us = 0, solve_us = 0, wait_us = 0;
  double bytes_before = 0, bytes_predicted = 0, bytes_counted = 0;
  int moved = 0, n_samples = 0;
  // --layer: times of update, (Begin,) dispatch and combine; of the re-placing layers, how many moved samples and
  // skipped Begin.
  double plain_layer_us = 0, layer_us = 0, gain = 0, predicted_gain = 0;
  int n_layers = 0, n_moved = 0, n_skipped = 0;
  uint64_t wrong = 0;
  double ratio() const { return replaced_us / same_bytes_us; }
};

class Bench {
 public:
  Bench(const ReplaceOptions& o, const Truth& truth, int n_experts, const Team& team, const std::string& algorithm)
      : o_(o), truth_(truth), team_(team), comm_(team.comm(0)), rank_(team.rank(0)) {
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = o.hidden * sizeof(float);
    config.type = moecclFloat32;
    config.top_k = o.top_k;
    config.n_experts = n_experts;
    config.max_tokens = truth.tokens_per_rank();
    config.layout = moecclLayoutExpertMajor;
    config.algorithm = algorithm.c_str();
    demand(moecclMoeCreate(&moe_, comm_, &config), "moecclMoeCreate");
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = o.sample_tokens;
    replace.residual = o.residual;
    replace.min_gain = -1;
    demand(moecclReplaceCreate(&replacement_, moe_, &replace), "moecclReplaceCreate");
    replace.min_gain = 0, replace.residual = 0;
    if (o.layer) demand(moecclReplaceCreate(&gated_, moe_, &replace), "moecclReplaceCreate");
    std::vector<size_t> here(truth.tokens_per_rank());
    for (size_t t = 0; t < here.size(); t++) here[t] = static_cast<size_t>(rank_) * here.size() + t;
    before_ = route(here);
    out_ = Buffer(row_bytes(here.size()), o.job.memory);
  }
  ~Bench() {
    for (const moecclRouting_t r : {before_, same_})
      if (r != nullptr) (void)moecclRoutingDestroy(r);
    (void)moecclReplaceDestroy(replacement_);
    if (gated_ != nullptr) (void)moecclReplaceDestroy(gated_);
    (void)moecclMoeDestroy(moe_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  Line run() {
    Line line;
    const auto info = rows_of(before_);
    line.algorithm = info.algorithm;
    dispatched_ = Buffer(row_bytes(info.n_rows), o_.job.memory);
    tokens_ = Buffer(out_.bytes(), o_.job.memory);
    for (size_t i = 0; i < truth_.tokens_per_rank() * o_.hidden; i++)
      floats(tokens_)[i] =
          truth_.x(static_cast<size_t>(rank_) * truth_.tokens_per_rank() + i / o_.hidden, i % o_.hidden);
    begin_step(nullptr);
    size_t n_rows = 0;
    demand(moecclReplaceRows(replacement_, &n_rows), "moecclReplaceRows");
    in_ = Buffer(row_bytes(n_rows), o_.job.memory);
    fill(info, floats(in_));
    if (o_.residual)
      demand(moecclReplaceResidual(replacement_, tokens_.data(), dispatched_.data(), in_.data()),
             "moecclReplaceResidual");
    line.wrong = verify(line);
    same_in_ = Buffer(row_bytes(rows_of(same_).n_rows), o_.job.memory);
    fill(rows_of(same_), floats(same_in_));
    measure(line);
    if (o_.layer) measure_layers(line);
    return line;
  }

 private:
  static float* floats(const Buffer& b) { return reinterpret_cast<float*>(b.data()); }
  size_t row_bytes(size_t rows) const { return std::max<size_t>(1, rows) * o_.hidden * sizeof(float); }
  void demand(moecclResult_t result, const char* call) const { check(result, call, rank_, comm_); }

  struct Choices {
    std::vector<int32_t> index;
    std::vector<float> weight;
  };
  Choices choices_of(const std::vector<size_t>& tokens) const {
    Choices c;
    for (const size_t t : tokens) {
      for (size_t k = 0; k < static_cast<size_t>(o_.top_k); k++) {
        c.index.push_back(truth_.expert(t, k));
        c.weight.push_back(truth_.weight(t, k));
      }
    }
    return c;
  }
  moecclRouting_t route(const std::vector<size_t>& tokens) const {
    const Choices c = choices_of(tokens);
    moecclRouting_t routing = nullptr;
    demand(moecclRoutingCreate(&routing, moe_, c.index.data(), c.weight.data(), tokens.size()), "moecclRoutingCreate");
    return routing;
  }
  moecclRoutingInfo_t rows_of(moecclRouting_t routing) const {
    moecclRoutingInfo_t info{};
    info.size = sizeof info;
    demand(moecclRoutingGetInfo(routing, &info), "moecclRoutingGetInfo");
    return info;
  }
  moecclReplaceInfo_t facts(moecclReplacement_t of = nullptr) const {
    moecclReplaceInfo_t info{};
    info.size = sizeof info;
    demand(moecclReplaceGetInfo(of != nullptr ? of : replacement_, &info), "moecclReplaceGetInfo");
    return info;
  }
  // As in a layer, the solver works while tokens travel.
  void begin_step(std::vector<double>* begin_us) {
    const double us = team_.timed_us(
        [&] { demand(moecclReplaceBegin(replacement_, before_, nullptr, nullptr), "moecclReplaceBegin"); });
    if (begin_us != nullptr) begin_us->push_back(us);
    demand(moecclDispatch(before_, tokens_.data(), dispatched_.data(), nullptr), "moecclDispatch");
  }
  // Writes the experts' outputs: rows of `info` belong to tokens that began on rank row_source.
  void fill(const moecclRoutingInfo_t& info, float* rows) const {
    for (int32_t e = 0; e < info.n_local_experts; e++) {
      for (int64_t r = info.expert_offsets[e]; r < info.expert_offsets[e + 1]; r++) {
        if (info.row_source[r] < 0) continue;
        const size_t token =
            static_cast<size_t>(info.row_source[r]) * truth_.tokens_per_rank() + static_cast<size_t>(info.row_token[r]);
        for (size_t i = 0; i < o_.hidden; i++)
          rows[static_cast<size_t>(r) * o_.hidden + i] = truth_.y(token, info.local_experts[e], i);
      }
    }
  }
  // Runs one checked combine, then makes the routing with the same tokens at the same homes.
  uint64_t verify(Line& line) {
    demand(moecclReplaceCombine(replacement_, in_.data(), out_.data(), nullptr), "moecclReplaceCombine");
    const moecclReplaceInfo_t info = facts();
    std::vector<size_t> here;
    uint64_t wrong = 0;
    for (int32_t s = 0; s < info.n_local; s++)
      for (size_t t = 0; t < o_.sample_tokens; t++)
        here.push_back(static_cast<size_t>(info.local_samples[s]) * o_.sample_tokens + t);
    for (size_t i = 0; i < here.size() * o_.hidden; i++)
      wrong += floats(out_)[i] != truth_.sum(here[i / o_.hidden], i % o_.hidden);
    line.moved = info.moved;
    line.n_samples = info.n_samples;
    line.bytes_before = static_cast<double>(info.node_bytes_before);
    line.bytes_predicted = static_cast<double>(info.node_bytes_after);
    line.bytes_counted = static_cast<double>(team_.sum({info.node_bytes_sent}));
    wrong += line.bytes_counted != line.bytes_predicted;
    same_ = route(here);
    return team_.sum({wrong});
  }
  void measure(Line& line) {
    std::vector<double> replaced, same, before, begin, solve, wait;
    Buffer other(out_.bytes(), o_.job.memory);
    for (int i = -o_.warmup; i < o_.iters; i++) {
      std::vector<double> unused;
      begin_step(i < 0 ? &unused : &begin);
      const moecclReplaceInfo_t info = facts();  // waits: the combine is timed by itself, as if experts ran in between
      const auto combine_replaced = [&] {
        return team_.timed_us([&] {
          demand(moecclReplaceCombine(replacement_, in_.data(), out_.data(), nullptr), "moecclReplaceCombine");
        });
      };
      const auto combine_plainly = [&](moecclRouting_t routing, const Buffer& in) {
        return team_.timed_us(
            [&] { demand(moecclCombine(routing, in.data(), other.data(), nullptr), "moecclCombine"); });
      };
      // They take turns to be first, so that neither finds warmer caches than the other.
      double r = 0, s = 0;
      if (i % 2 == 0) {
        r = combine_replaced();
        s = combine_plainly(same_, same_in_);
      } else {
        s = combine_plainly(same_, same_in_);
        r = combine_replaced();
      }
      const double b = combine_plainly(before_, in_);
      if (i < 0) continue;
      replaced.push_back(r), same.push_back(s), before.push_back(b);
      solve.push_back(info.solve_us), wait.push_back(info.wait_us);
    }
    line.replaced_us = team_.slowest(replaced);
    line.same_bytes_us = team_.slowest(same);
    line.before_us = team_.slowest(before);
    line.begin_us = team_.slowest(begin);
    line.solve_us = team_.slowest(solve);
    line.wait_us = team_.slowest(wait);
  }
  // Whole layers alternate, and so does the first of a pair. The re-placing ones decide for themselves.
  void measure_layers(Line& line) {
    std::vector<size_t> here(truth_.tokens_per_rank());
    for (size_t t = 0; t < here.size(); t++) here[t] = static_cast<size_t>(rank_) * here.size() + t;
    const Choices c = choices_of(here);
    std::vector<double> plain, replaced;
    const auto start = [&] {
      demand(moecclRoutingUpdate(before_, c.index.data(), c.weight.data(), here.size()), "moecclRoutingUpdate");
    };
    const auto dispatch = [&] {
      demand(moecclDispatch(before_, tokens_.data(), dispatched_.data(), nullptr), "moecclDispatch");
    };
    const auto plain_layer = [&] {
      return team_.timed_us([&] {
        start(), dispatch();
        demand(moecclCombine(before_, in_.data(), out_.data(), nullptr), "moecclCombine");
      });
    };
    moecclReplaceInfo_t info{};
    const auto replacing_layer = [&] {
      const double us = team_.timed_us([&] {
        start();
        demand(moecclReplaceBegin(gated_, before_, nullptr, nullptr), "moecclReplaceBegin");
        dispatch();
        demand(moecclReplaceCombine(gated_, in_.data(), out_.data(), nullptr), "moecclReplaceCombine");
      });
      info = facts(gated_);
      return us;
    };
    // Negative rounds last until the trial of both ways has ended.
    for (int i = -12; i < o_.iters; i++) {
      double p = 0, r = 0;
      if (i % 2 == 0) p = plain_layer(), r = replacing_layer();
      if (i % 2 != 0) r = replacing_layer(), p = plain_layer();
      if (i < 0) continue;
      plain.push_back(p), replaced.push_back(r);
      line.n_layers++, line.n_moved += info.keep == 0, line.n_skipped += info.skipped;
      line.gain = info.gain;
      if (info.skipped == 0) line.predicted_gain = info.predicted_gain;
    }
    line.plain_layer_us = team_.slowest(plain), line.layer_us = team_.slowest(replaced);
  }

  const ReplaceOptions& o_;
  const Truth& truth_;
  const Team& team_;
  moecclComm_t comm_;
  int rank_;
  moecclMoe_t moe_ = nullptr;
  moecclReplacement_t replacement_ = nullptr, gated_ = nullptr;
  moecclRouting_t before_ = nullptr, same_ = nullptr;
  Buffer tokens_, dispatched_, in_, same_in_, out_;
};

std::string describe(const ReplaceOptions& o, int n_ranks, int n_experts) {
  char text[300];
  std::snprintf(text, sizeof text,
                "%d ranks of %zu samples of %zu tokens, hidden %zu float, top-%d of %d experts, locality %.2f%s%s",
                n_ranks, o.samples, o.sample_tokens, o.hidden, o.top_k, n_experts, o.locality,
                o.residual ? ", residual inlined" : "", o.job.pace ? ", links paced: EMULATED" : "");
  return text;
}

void print(const std::string& description, const std::vector<Line>& lines) {
  std::printf(
      "# replace_perf: %s\n# Times (us): median over iterations of the slowest rank. same: plain combine of the "
      "same bytes.\n# MB (10^6 bytes) between nodes in one combine, all ranks: before, predicted by the solver, "
      "counted.\n",
      description.c_str());
  std::printf("# %-8s %11s %11s %7s %11s %9s %9s %9s %7s %9s %9s %9s %7s\n", "plan", "re-placing", "same", "ratio",
              "before", "begin", "solve", "wait", "moved", "MB before", "predicted", "counted", "#wrong");
  for (const Line& l : lines)
    std::printf("  %-8s %11.1f %11.1f %7.3f %11.1f %9.1f %9.1f %9.1f %3d/%-3d %9.3f %9.3f %9.3f %7llu\n",
                l.algorithm.c_str(), l.replaced_us, l.same_bytes_us, l.ratio(), l.before_us, l.begin_us, l.solve_us,
                l.wait_us, l.moved, l.n_samples, l.bytes_before / 1e6, l.bytes_predicted / 1e6, l.bytes_counted / 1e6,
                static_cast<unsigned long long>(l.wrong));
}

void print_layers(const std::vector<Line>& lines) {
  std::printf(
      "# whole layers in turns (us): update, dispatch, combine; and with Begin and the re-placing combine\n"
      "# %-8s %11s %11s %7s %8s %9s %14s\n",
      "plan", "re-placing", "plain", "ratio", "gain", "Eq. 5", "moved/skipped");
  for (const Line& l : lines)
    std::printf("  %-8s %11.1f %11.1f %7.3f %7.1f%% %8.1f%% %6d/%d of %d\n", l.algorithm.c_str(), l.layer_us,
                l.plain_layer_us, l.layer_us / l.plain_layer_us, 100 * l.gain, 100 * l.predicted_gain, l.n_moved,
                l.n_skipped, l.n_layers);
}

std::string to_json(const ReplaceOptions& o, const std::string& description, const std::vector<Line>& lines) {
  Json j;
  j["config"] = description;
  j["results"] = Json::array();
  for (const Line& l : lines)
    j["results"].push_back(
        {{"plan", l.algorithm},
         {"emulated", o.job.pace},
         {"replacing_us", l.replaced_us},
         {"same_bytes_us", l.same_bytes_us},
         {"ratio", l.ratio()},
         {"before_us", l.before_us},
         {"begin_us", l.begin_us},
         {"solve_us", l.solve_us},
         {"wait_us", l.wait_us},
         {"layer",
          {{"replacing_us", l.layer_us},
           {"plain_us", l.plain_layer_us},
           {"gain", l.gain},
           {"predicted_gain", l.predicted_gain},
           {"layers", l.n_layers},
           {"moved", l.n_moved},
           {"skipped", l.n_skipped}}},
         {"moved", l.moved},
         {"samples", l.n_samples},
         {"node_bytes", {{"before", l.bytes_before}, {"predicted", l.bytes_predicted}, {"counted", l.bytes_counted}}},
         {"nwrong", l.wrong}});
  return j.dump(2) + "\n";
}

int replace_main(int argc, char** argv) {
  const ReplaceOptions o = parse(argc, argv);
  Job job(o.job);
  const int n_experts = o.n_experts > 0 ? o.n_experts : 2 * job.n_ranks();
  if (o.top_k > n_experts) fail("top-" + std::to_string(o.top_k) + " of " + std::to_string(n_experts) + " experts");
  const Truth truth(o, n_experts);
  std::vector<Line> lines;
  job.run(o.job.pace, [&](int thread, const Team& team) {
    for (const std::string& algorithm : o.algorithms) {
      const Line line = Bench(o, truth, n_experts, team, algorithm).run();
      if (thread == 0) lines.push_back(line);
    }
  });
  uint64_t wrong = 0;
  for (const Line& l : lines) wrong += l.wrong;
  const std::string description = describe(o, job.n_ranks(), n_experts);
  if (job.leads()) print(description, lines);
  if (job.leads() && o.layer) print_layers(lines);
  if (job.leads()) write_or_fail({{o.output_file, to_json(o, description, lines)}});
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace perf

int main(int argc, char** argv) { return perf::replace_main(argc, argv); }
