// SPDX-License-Identifier: Apache-2.0
// Shows what the tuner would change in NCCL's own selection: tuner_table PLUGIN PROFILES prints a table for each
// profile of tests/fixtures/tuner, with the machine that NCCL would take such hosts for.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "tests/plugins/tuner_host.h"

using namespace moeccl::testing;

namespace {

struct Setting {
  const char* profile;
  const char* rails;
  Machine machine;
  const char* takes_for;
};

constexpr size_t kSizes[] = {1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30};
constexpr size_t kNodes[] = {2, 4, 8, 16, 64, 512};

struct Counts {
  int cells = 0, changed = 0;
  double most = 1;
};

// Returns NCCL's entry and the one that it takes after the tuner's answer, with the ratio of their costs at the tuner's
// prices. Returns only NCCL's entry when nothing changed.
std::string cell(const TunerContext& tuner, const Setting& s, size_t nodes, int function, size_t bytes,
                 Counts& counts) {
  const CostTable before = nccl_costs(s.machine, nodes, function, bytes);
  CostTable after = before;
  if (tuner.ask(function, bytes, after) != 0) std::exit(1);
  const int theirs = nccl_choice(before), ours = nccl_choice(after);
  ++counts.cells;
  if (theirs == ours) return entry_name(theirs);
  ++counts.changed;
  const auto cost = [&](int entry) {
    return static_cast<double>(after[static_cast<size_t>(entry) / 3][static_cast<size_t>(entry) % 3]);
  };
  counts.most = std::max(counts.most, cost(theirs) / cost(ours));
  char text[96];
  std::snprintf(text, sizeof text, "%s -> %s %.1fx", entry_name(theirs).c_str(), entry_name(ours).c_str(),
                cost(theirs) / cost(ours));
  return text;
}

void print(const TunerFile& file, const Setting& s, int function, const char* name) {
  std::printf("\n**%s**, %s, %s\n\n| hosts |", s.profile, name, s.takes_for);
  for (const size_t bytes : kSizes) {
    std::printf(bytes < (1 << 20) ? " %zu KiB |" : " %zu MiB |", bytes < (1 << 20) ? bytes >> 10 : bytes >> 20);
  }
  std::printf("\n|-|");
  for (size_t i = 0; i < std::size(kSizes); ++i) std::printf("-|");
  Counts counts;
  for (const size_t nodes : kNodes) {
    const TunerContext tuner(file, {.n_ranks = nodes * s.machine.ranks_per_node, .n_nodes = nodes});
    std::printf("\n| %zu |", nodes);
    for (const size_t bytes : kSizes) std::printf(" %s |", cell(tuner, s, nodes, function, bytes, counts).c_str());
  }
  std::printf("\n\n%d of %d changed, at most %.1f times faster by the measured links\n", counts.changed, counts.cells,
              counts.most);
}

void time_one(const TunerFile& file) {
  const TunerContext tuner(file, {.n_ranks = 128, .n_nodes = 16, .log = nullptr});
  const CostTable table = nccl_costs({}, 16, 4, 1 << 20);
  constexpr int kTimes = 200000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kTimes; ++i) {
    CostTable copy = table;
    (void)tuner.ask(4, 1 << 20, copy);
  }
  const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
  std::printf("\none question takes %.0f ns\n", ns / kTimes);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s PLUGIN FOLDER_OF_PROFILES\n", argv[0]);
    return 2;
  }
  const TunerFile file(argv[1]);
  const Machine pci{"", 2, 2, 5, 0.625, false, false, 0};
  const Machine cloud{"", 8, 4, 40, 3.125, true, false, 0};
  const Machine one_card{"", 8, 4, 40, 6, true, true, 0};
  const Machine dgx{"", 8, 16, 24, 24, true, true, 400};
  const Machine single{"", 1, 2, 24, 12, true, true, 0};
  const Setting settings[] = {
      {"gigabit", "1", pci, "2 GPUs on PCI a host; NCCL takes the card for 10 Gbit/s, as veth says"},
      {"cloud", "1", cloud, "8 A100 a host; NCCL takes the card for 100 Gbit/s"},
      {"sites", "1", one_card, "8 H100 a host; NCCL takes all links for 200 Gbit/s"},
      {"sites", "1", single, "1 GPU a host; NCCL takes all links for 200 Gbit/s"},
      {"infiniband", "8", dgx, "8 H100 with a card of 400 Gbit/s each a host, NVLink SHARP; what NCCL takes it for"},
  };
  for (const Setting& s : settings) {
    setenv("MOECCL_PROFILE", (std::string(argv[2]) + "/" + s.profile + ".json").c_str(), 1);
    setenv("MOECCL_TUNER_RAILS", s.rails, 1);
    print(file, s, moeccl::tuner::kAllReduce, "AllReduce");
    print(file, s, moeccl::tuner::kAllGather, "AllGather (bytes of all ranks)");
  }
  time_one(file);
  return 0;
}
