// SPDX-License-Identifier: Apache-2.0
// Trains a small Transformer with MoE layers on 4 nodes of 2 ranks, emulated on this machine by paced links, once with
// each of the library's expert-parallel features, and prints the time of a step and the loss: docs/training-example.md.
//
//   training_run [--data even|skewed] [--features NAME,NAME...] [--warm N] [--rounds N] [--steps N] [--svg FILE]
//   ... --keep-places         experts trade places only in the --warm steps, not in the timed ones
//   training_run --list       prints the names of the features
//   training_run --check      trains a small model on unpaced links and checks its gradients, and that features do not
//                             change the loss
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <sstream>
#include <thread>

#include "../arguments.h"
#include "report.h"

namespace training {
namespace {

constexpr int kRanks = 8, kRanksPerNode = 2;
constexpr const char* kTopology = "node:4 gpu:2";

struct Options {
  Shape shape;
  Routing routing;
  std::string data = "even", svg, topology = "node:4(bw=25MB/s,lat=50us) gpu:2(bw=2GB/s,lat=5us)";
  std::vector<std::string> features;
  size_t warm = 12, rounds = 5, steps = 3;
  size_t seed = 1;
  bool check = false, keep_places = false;
  std::string given;  // the command line after the program's name
};

LayerFeature way(LayerFeature::Way w, double capacity = 0, bool places = true) {
  LayerFeature f;
  f.way = w;
  f.capacity = capacity;
  f.places = places;
  return f;
}

std::vector<Feature> all_features(double ratio, double capacity) {
  LayerFeature swap, domains = way(LayerFeature::kDomains);
  swap.swap = true;
  domains.ratio = ratio;
  const LayerFeature tokens, replaced = way(LayerFeature::kReplaced), replicas = way(LayerFeature::kReplicas, capacity);
  return {{"flat", "flat", {tokens}},
          {"auto", "auto", {tokens}},
          {"swap", "auto", {swap}},
          {"flat re-placing", "flat", {replaced}},
          {"re-placing", "auto", {replaced}},
          {"fixed slots", "auto", {way(LayerFeature::kReplicas, capacity, false)}},
          {"replicas", "auto", {replicas}},
          {"domains", "auto", {domains}},
          // Expert swap and re-placing of samples cannot be used on the same layer.
          {"swap and re-placing", "auto", {swap, replaced}},
          {"all", "auto", {swap, replaced, replicas, domains}}};
}

// Trains all features side by side, one step of each in turn, so that a disturbance of the machine affects all alike.
class Trainer {
 public:
  Trainer(const Options& o, const std::vector<Feature>& features, const Corpus& corpus, const Ranks& ranks)
      : o_(o), ranks_(ranks) {
    for (const Feature& f : features) {
      models_.push_back(std::make_unique<Transformer>(f, o.shape, corpus, ranks));
      Run& run = runs.emplace_back();
      run.name = f.name;
      for (size_t l = 0; l < o.shape.layers; l++)
        if (f.of(l).way == LayerFeature::kReplicas)
          run.slot_choices += static_cast<double>(o.shape.tokens() * static_cast<size_t>(o.shape.top_k * ranks.n));
    }
  }

  void train() {
    for (size_t m = 0; m < models_.size(); m++)
      for (size_t s = 0; s < o_.warm; s++) step(m);
    if (o_.keep_places)
      for (const auto& m : models_) m->keep_places();
    for (size_t r = 0; r < o_.rounds; r++) {
      for (Run& run : runs) run.rounds.emplace_back();
      for (size_t s = 0; s < o_.steps; s++)
        for (size_t m = 0; m < models_.size(); m++) runs[m].rounds.back().push_back(step(m));
      if (ranks_.rank == 0) std::fprintf(stderr, "round %zu of %zu\n", r + 1, o_.rounds);
    }
  }
  double gradient_error(size_t m) { return models_[m]->gradient_error(runs[m].loss.size()); }

  std::vector<Run> runs;

 private:
  StepReport step(size_t m) {
    // Another feature's optimizer may still be gathering weights.
    check(moecclStreamSynchronize(ranks_.stream), "moecclStreamSynchronize");
    const std::vector<uint64_t> before = traffic(ranks_);
    ranks_.times.spans.clear();
    const StepFacts facts = models_[m]->step(runs[m].loss.size());
    const StepReport report = join(ranks_, facts, before, kRanksPerNode);
    runs[m].loss.push_back(facts.loss);
    runs[m].swaps += facts.swaps;
    return report;
  }

  const Options& o_;
  const Ranks& ranks_;
  std::vector<std::unique_ptr<Transformer>> models_;
};

const Run& find(const std::vector<Run>& runs, const char* name) {
  for (const Run& r : runs)
    if (r.name == name) return r;
  std::abort();
}

// Checks what the features promise about the loss, and that each of them had an effect.
bool claims_hold(const std::vector<Run>& runs, double gradient_error) {
  bool good = true;
  const auto claim = [&](bool holds, const std::string& text) {
    std::printf("%s  %s\n", holds ? "yes" : "NO ", text.c_str());
    good = good && holds;
  };
  const Run& flat = find(runs, "flat");
  const auto number = [](double v) {
    std::ostringstream s;
    s << v;
    return s.str();
  };
  claim(gradient_error < 0.002, "gradients are the loss's differences within 0.2 % (" + number(gradient_error) + ")");
  claim(flat.loss.back() < 0.9 * flat.loss.front(), "the loss falls");
  claim(find(runs, "auto").loss == flat.loss, "auto = flat, bit by bit");
  for (const char* name : {"swap", "flat re-placing", "re-placing", "replicas without capacity", "exact domains",
                           "swap and re-placing", "all without capacity, exact"})
    claim(find(runs, name).apart(flat) < 1e-5,
          std::string(name) + " = flat within 1e-5 (" + number(find(runs, name).apart(flat)) + ")");
  claim(find(runs, "swap").swaps > 0 && find(runs, "swap and re-placing").swaps > 0, "experts changed places");
  const auto drops = [](const Run& r) {
    int64_t n = 0;
    for (const auto& round : r.rounds)
      for (const StepReport& s : round) n += s.facts.dropped;
    return n;
  };
  const int64_t fixed = drops(find(runs, "fixed slots")), placed = drops(find(runs, "replicas"));
  claim(placed < fixed, "replicas by popularity drop fewer choices than fixed slots (" +
                            number(static_cast<double>(placed)) + " and " + number(static_cast<double>(fixed)) + ")");
  return good;
}

std::vector<Feature> chosen_features(const Options& o) {
  if (!o.check) {
    std::vector<Feature> chosen;
    for (const Feature& f : all_features(50, 1))
      if (o.features.empty() || std::find(o.features.begin(), o.features.end(), f.name) != o.features.end())
        chosen.push_back(f);
    return chosen;
  }
  std::vector<Feature> chosen = all_features(50, 1);
  for (Feature f : all_features(1, 0)) {
    if (f.name == "replicas") f.name = "replicas without capacity", chosen.push_back(f);
    if (f.name == "domains") f.name = "exact domains", chosen.push_back(f);
    if (f.name == "all") f.name = "all without capacity, exact", chosen.push_back(f);
  }
  return chosen;
}

// Runs one rank's part. Rank 0 also reports, and its result is the exit status of the process.
int train(const Options& o, moecclComm_t comm) {
  const Ranks ranks(comm, {o.check ? kTopology : o.topology.c_str(), !o.check});
  const Corpus corpus(o.shape, o.routing, ranks.n, kRanksPerNode, o.seed);
  Trainer trainer(o, chosen_features(o), corpus, ranks);
  trainer.train();
  const double gradient_error = o.check ? trainer.gradient_error(0) : 0;
  if (ranks.rank != 0) return 0;
  print_table(trainer.runs);
  if (o.check) return claims_hold(trainer.runs, gradient_error) ? 0 : 1;
  print_rows(trainer.runs, o.data, o.given);
  if (!o.svg.empty() && !write_svg(o.svg, trainer.runs, "data: " + o.data + "; links (EMULATED): " + o.topology))
    return 1;
  return 0;
}

int run(const Options& o) {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.topology = o.check ? kTopology : o.topology.c_str();
  config.pace = o.check ? 0 : 1;
  config.deterministic = 1;  // the order of sums does not depend on the plan
  config.timeout_ms = 120000;
  moecclComm_t comms[kRanks];
  check(moecclCommInitAll(comms, kRanks, &config), "moecclCommInitAll");
  std::vector<std::thread> others;
  for (int r = 1; r < kRanks; r++) others.emplace_back([&, r] { (void)train(o, comms[r]); });
  const int status = train(o, comms[0]);
  for (std::thread& t : others) t.join();
  for (moecclComm_t comm : comms) check(moecclCommDestroy(comm), "moecclCommDestroy");
  return status;
}

// Selects one of the data sets that docs/training-example.md describes.
bool set_data(Options& o, const std::string& name) {
  o.data = name;
  if (name == "even") {
    o.routing = {0, 0.28, 0.13, false};
  } else if (name == "skewed") {
    o.routing = {0.8, 0, 0, true};
  } else {
    return false;
  }
  return true;
}

void make_small(Options& o) {
  o.shape = {4, 64, 32, 2, 32, 32, 16, 2, 32, 8, 4};
  o.routing = {0.8, 0.28, 0.13, false};
  o.warm = 0, o.rounds = 1, o.steps = 8;
}

bool take_features(const std::string& names, std::vector<std::string>& features) {
  const std::vector<Feature> known = all_features(50, 1);
  std::istringstream list(names);
  for (std::string f; std::getline(list, f, ',');) {
    if (std::none_of(known.begin(), known.end(), [&f](const Feature& k) { return k.name == f; })) {
      std::fprintf(stderr, "--features %s: there is none of this name; those that exist:\n", f.c_str());
      for (const Feature& k : known) std::fprintf(stderr, "  %s\n", k.name.c_str());
      return false;
    }
    features.push_back(f);
  }
  return true;
}

// Takes an option that has a value.
bool take(const std::string& name, const std::string& value, Options& o) {
  constexpr size_t kMany = 1'000'000;
  struct Count {
    size_t* to;
    size_t least, most;
  };
  size_t top_k = static_cast<size_t>(o.shape.top_k);
  const std::map<std::string, Count> counts = {
      {"--warm", {&o.warm, 0, kMany}},    {"--rounds", {&o.rounds, 1, kMany}},
      {"--steps", {&o.steps, 1, kMany}},  {"--samples", {&o.shape.samples, 1, 1024}},
      {"--seed", {&o.seed, 0, SIZE_MAX}}, {"--top-k", {&top_k, 1, static_cast<size_t>(o.shape.experts)}}};
  struct Share {
    double* to;
    double most;
  };
  const std::map<std::string, Share> shares = {{"--zipf", {&o.routing.zipf, 10}},
                                               {"--on-rank", {&o.routing.on_rank, 1}},
                                               {"--on-node", {&o.routing.on_node, 1}}};
  const std::map<std::string, std::string*> texts = {{"--svg", &o.svg}, {"--topology", &o.topology}};
  if (name == "--data") return set_data(o, value);
  if (name == "--features") return take_features(value, o.features);
  if (texts.contains(name)) *texts.at(name) = value;
  if (shares.contains(name)) return take_number(name, value, shares.at(name).most, shares.at(name).to);
  if (!counts.contains(name)) return texts.contains(name);
  const Count& count = counts.at(name);
  if (!take_whole(name, value, count.least, count.most, count.to)) return false;
  o.shape.top_k = static_cast<int>(top_k);
  return true;
}

bool parse(int argc, char** argv, Options& o) {
  set_data(o, "even");
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    o.given += word.find(' ') == std::string::npos ? " " + word : " '" + word + "'";
  }
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    if (name == "--check") {
      o.check = true;
      make_small(o);
    } else if (name == "--keep-places") {
      o.keep_places = true;
    } else if (i + 1 == argc || !take(name, argv[++i], o)) {
      return false;
    }
  }
  if (o.routing.on_rank + o.routing.on_node <= 1) return true;
  std::fprintf(stderr, "--on-rank %g and --on-node %g are more than all tokens\n", o.routing.on_rank,
               o.routing.on_node);
  return false;
}

}  // namespace
}  // namespace training

int main(int argc, char** argv) {
  training::Options options;
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const training::Feature& f : training::all_features(50, 1)) std::printf("%s\n", f.name.c_str());
    return 0;
  }
  if (!training::parse(argc, argv, options)) {
    std::fprintf(
        stderr,
        "training_run [--data even|skewed] [--features NAME,...] [--warm N] [--rounds N] [--steps N] [--svg FILE]\n"
        "             [--keep-places] [--topology TEXT] [--zipf X] [--on-rank X] [--on-node X] [--top-k N] [--samples "
        "N] [--seed N]\n"
        "training_run --list | --check\n");
    return 2;
  }
  if (!training::can_write(options.svg)) return 2;
  return training::run(options);
}
