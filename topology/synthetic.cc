// SPDX-License-Identifier: Apache-2.0
#include "topology/synthetic.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>
#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

namespace {

using plan::kMaxRanks;
using plan::LevelSizes;
using plan::LevelTree;
using plan::LinkCost;

constexpr size_t kMaxName = 31;        // moecclLevelTraffic_t::name
constexpr size_t kMaxText = 4u << 20;  // one number and a plus for each of 2^20 ranks
constexpr double kMaxFigure = 1e15;

struct Unit {
  std::string_view name;
  double scale;  // to GB/s, to ns
};
// In order of preference among units that take equally many characters, the best last.
constexpr Unit kRates[] = {{"Mbit/s", 0.125e-3}, {"Gbit/s", 0.125}, {"B/s", 1e-9}, {"KB/s", 1e-6},
                           {"MB/s", 1e-3},       {"GB/s", 1},       {"TB/s", 1e3}};
constexpr Unit kTimes[] = {{"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_space(char c) { return c == ' ' || c == '\t'; }

std::string names_of(std::span<const Unit> units) {
  std::string names;
  for (const Unit& unit : units) names += (names.empty() ? "" : ", ") + std::string(unit.name);
  return names;
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Result<std::vector<LevelSizes>> levels() {
    std::vector<LevelSizes> all;
    for (skip_space(); at_ < text_.size(); skip_space()) {
      if (all.size() == kMaxLevels) return wrong(format("the end: at most {} levels are possible", kMaxLevels));
      const size_t start = at_;
      MOECCL_ASSIGN_OR_RETURN(LevelSizes level, one_level());
      for (const LevelSizes& before : all)
        if (before.name == level.name) return wrong_at(start, "a name that no level before has");
      MOECCL_TRY(spread(all.empty() ? 1 : groups_, start, level));
      all.push_back(std::move(level));
      if (at_ < text_.size() && !is_space(text_[at_])) return wrong("a space, or \"(\" with bw= and lat=");
    }
    if (all.empty()) return wrong("a level such as node:2");
    return all;
  }
  uint64_t n_ranks() const { return groups_; }

 private:
  Status wrong_at(size_t at, const std::string& wanted) const {
    const std::string found = at < text_.size() ? format("\"{}\"", printable(text_.substr(at, 12))) : "the end";
    const std::string shown = printable(text_.substr(0, 64)) + (text_.size() > 64 ? "..." : "");
    return error(moecclInvalidArgument, "topology \"{}\", position {}: found {}, wanted {}", shown, at + 1, found,
                 wanted);
  }
  Status wrong(const std::string& wanted) const { return wrong_at(at_, wanted); }
  static std::string printable(std::string_view text) {
    std::string shown(text);
    for (char& c : shown)
      if (c < ' ' || c > '~') c = '?';
    return shown;
  }

  bool next_is(char c) const { return at_ < text_.size() && text_[at_] == c; }
  void skip_space() {
    while (at_ < text_.size() && is_space(text_[at_])) ++at_;
  }

  // Parses the sizes as they are written; spread() makes one for each parent.
  Result<LevelSizes> one_level() {
    LevelSizes level;
    const size_t start = at_;
    if (at_ == text_.size() || !is_letter(text_[at_])) return wrong("the name of a level, such as node");
    while (at_ < text_.size() &&
           (is_letter(text_[at_]) || is_digit(text_[at_]) || text_[at_] == '_' || text_[at_] == '-'))
      ++at_;
    if (at_ - start > kMaxName) return wrong_at(start, format("a name of at most {} characters", kMaxName));
    level.name = std::string(text_.substr(start, at_ - start));
    if (!next_is(':')) return wrong("\":\" and the number of groups");
    do {
      ++at_;
      MOECCL_ASSIGN_OR_RETURN(const uint32_t size, number());
      level.sizes.push_back(size);
    } while (next_is('+'));
    if (next_is('(')) MOECCL_TRY(link(level.link));
    return level;
  }

  Result<uint32_t> number() {
    uint32_t value = 0;
    const char* first = text_.data() + at_;
    const auto [last, code] = std::from_chars(first, text_.data() + text_.size(), value);
    if (code != std::errc() || value == 0 || value > kMaxRanks)
      return wrong(format("a number between 1 and {}", kMaxRanks));
    at_ += static_cast<size_t>(last - first);
    return value;
  }

  Status link(LinkCost& cost) {
    bool has_rate = false, has_latency = false;
    do {
      ++at_;  // "(" or ","
      const size_t start = at_;
      const std::string_view rest = text_.substr(at_);
      const bool rate = rest.starts_with("bw="), latency = rest.starts_with("lat=");
      if (!rate && !latency) return wrong("bw= or lat=");
      if (rate ? has_rate : has_latency) return wrong_at(start, "each of bw= and lat= once");
      at_ += rate ? 3 : 4;
      (rate ? has_rate : has_latency) = true;
      MOECCL_ASSIGN_OR_RETURN(const double figure, rate ? quantity(kRates) : quantity(kTimes));
      if (rate && !(figure >= 1e-9)) return wrong_at(start, "a bandwidth of at least 1B/s");
      (rate ? cost.bytes_per_ns : cost.alpha_ns) = figure;
    } while (next_is(','));
    if (!next_is(')')) return wrong("\",\" or \")\"");
    ++at_;
    return {};
  }

  Result<double> quantity(std::span<const Unit> units) {
    const size_t start = at_;
    double value = 0;
    if (at_ < text_.size() && is_digit(text_[at_])) {
      const char* first = text_.data() + at_;
      const auto [last, code] = std::from_chars(first, text_.data() + text_.size(), value);
      if (code != std::errc()) return wrong_at(start, "a decimal number");
      at_ += static_cast<size_t>(last - first);
    } else {
      return wrong("a decimal number");
    }
    size_t end = at_;
    while (end < text_.size() && (is_letter(text_[end]) || text_[end] == '/')) ++end;
    for (const Unit& unit : units) {
      if (text_.substr(at_, end - at_) != unit.name) continue;
      at_ = end;
      if (value * unit.scale > kMaxFigure) return wrong_at(start, "a smaller figure");
      return value * unit.scale;
    }
    return wrong("one of " + names_of(units));
  }

  // Expands to one size for each group of the level above, and counts the groups.
  Status spread(uint64_t parents, size_t start, LevelSizes& level) {
    if (level.sizes.size() == 1) level.sizes.assign(parents, level.sizes[0]);
    if (level.sizes.size() != parents)
      return wrong_at(start, format("one number, or one for each of the {} group{} above, not {}", parents,
                                    parents == 1 ? "" : "s", level.sizes.size()));
    groups_ = 0;
    for (const uint32_t size : level.sizes) groups_ += size;
    if (groups_ > kMaxRanks) return wrong_at(start, format("at most {} groups in all, not {}", kMaxRanks, groups_));
    return {};
  }

  std::string_view text_;
  size_t at_ = 0;
  uint64_t groups_ = 1;  // of the last level
};

// Returns the shortest form that parses back to the same figure.
std::string figure_text(double figure, std::span<const Unit> units) {
  std::string best;
  for (const Unit& unit : units) {
    const std::string number = format("{}", figure / unit.scale);
    double back = 0;
    std::from_chars(number.data(), number.data() + number.size(), back);
    if (back * unit.scale != figure) continue;
    if (best.empty() || number.size() + unit.name.size() <= best.size()) best = number + std::string(unit.name);
  }
  return best;
}

// Returns "" for groups of consecutive ranks.
std::string members_text(const plan::Level& level) {
  if (std::is_sorted(level.group_of_rank.begin(), level.group_of_rank.end())) return "";
  const plan::Groups groups(level);
  std::string text;
  for (uint32_t g = 0; g < level.n_groups; ++g) {
    const auto members = groups.members(g);
    text += (text.empty() ? "[" : " ") + cpus_text({members.begin(), members.end()});
  }
  return text + "]";
}

std::string link_text(const LinkCost& link) {
  std::string text;
  if (link.bytes_per_ns > 0) text = "bw=" + figure_text(link.bytes_per_ns, kRates);
  if (link.alpha_ns > 0) text += (text.empty() ? "lat=" : ",lat=") + figure_text(link.alpha_ns, kTimes);
  return text.empty() ? "" : "(" + text + ")";
}

}  // namespace

Result<LevelTree> parse_synthetic(std::string_view text, uint32_t n_ranks) {
  if (text.size() > kMaxText)
    return error(moecclInvalidArgument, "topology: a text of {} characters, at most {} are possible", text.size(),
                 kMaxText);
  Parser parser(text);
  MOECCL_ASSIGN_OR_RETURN(const std::vector<LevelSizes> written, parser.levels());
  if (n_ranks != 0 && parser.n_ranks() != n_ranks)
    return error(
        moecclInvalidArgument,
        "topology \"{}\" has {} ranks, the communicator has {}: give config.topology or MOECCL_TOPOLOGY that many",
        std::string(text.substr(0, 80)), parser.n_ranks(), n_ranks);
  const LevelSizes& last = written.back();
  if (written.size() == 1) {
    LevelTree tree = LevelTree::flat(last.sizes[0]);
    tree.levels[0].name = last.name;
    tree.levels[0].link = last.link;
    return tree;
  }
  // The text writes the sizes of level l at level l, as its groups per parent. from_sizes expects them at the parent.
  std::vector<LevelSizes> upper;
  for (size_t l = 0; l + 1 < written.size(); ++l)
    upper.push_back({written[l].name, written[l].link, written[l + 1].sizes});
  return LevelTree::from_sizes(upper, last.name, last.link);
}

std::string to_synthetic(const LevelTree& tree) {
  std::string text;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    const plan::Level& level = tree.levels[l];
    std::vector<uint32_t> sizes(l == 0 ? 1 : tree.levels[l - 1].n_groups, 0);
    uint32_t seen = 0;
    for (uint32_t r = 0; r < tree.n_ranks; ++r) {
      if (level.group_of_rank[r] != seen) continue;  // groups are numbered in order of their first rank
      ++seen;
      ++sizes[l == 0 ? 0 : tree.levels[l - 1].group_of_rank[r]];
    }
    text += format("{}{}:", text.empty() ? "" : " ", level.name);
    const bool even = std::all_of(sizes.begin(), sizes.end(), [&](uint32_t size) { return size == sizes[0]; });
    if (even) sizes.resize(1);
    for (size_t i = 0; i < sizes.size(); ++i) text += format("{}{}", i == 0 ? "" : "+", sizes[i]);
    text += members_text(level) + link_text(level.link);
  }
  return text;
}

}  // namespace moeccl::topology
