// SPDX-License-Identifier: Apache-2.0
#include "perf/common/grouping.h"

#include <charconv>
#include <cstdlib>
#include <map>
#include <set>

#include "perf/common/fail.h"

namespace perf {

int Grouping::color(int rank) const {
  const auto r = static_cast<uint32_t>(rank);
  switch (op) {
    case '&':
      return static_cast<int>(r & value);
    case '|':
      return static_cast<int>(r | value);
    case '%':
      return static_cast<int>(r % value);
    case '/':
      return static_cast<int>(r / value);
    default:
      return 0;
  }
}

std::string parse_grouping(const std::string& text, Grouping& grouping) {
  constexpr struct {
    const char* name;
    char op;
  } kOps[] = {{"AND", '&'}, {"OR", '|'}, {"MOD", '%'}, {"DIV", '/'}, {"&", '&'}, {"|", '|'}, {"%", '%'}, {"/", '/'}};
  grouping.text = text;
  for (const auto& [name, op] : kOps) {
    if (!text.starts_with(name)) continue;
    const size_t at = text.find_first_not_of(' ', std::string(name).size());
    std::string digits = at == std::string::npos ? "" : text.substr(at);
    const int base = digits.starts_with("0x") ? 16 : digits.starts_with("0b") ? 2 : 10;
    if (base != 10) digits.erase(0, 2);
    const auto [last, code] = std::from_chars(digits.data(), digits.data() + digits.size(), grouping.value, base);
    const uint32_t least = op == '%' || op == '/' ? 1 : 0;
    if (code != std::errc() || last != digits.data() + digits.size() || grouping.value < least ||
        grouping.value > INT32_MAX)
      break;
    grouping.op = op;
    return "";
  }
  return "\"" + text + "\" names no groups: give AND, OR, MOD or DIV and a number, such as \"MOD 2\" or \"AND 0x3\"";
}

Grouping grouping_of_environment() {
  Grouping grouping;
  const char* const by = std::getenv("NCCL_TESTS_SPLIT");
  const char* const mask = std::getenv("NCCL_TESTS_SPLIT_MASK");
  if (by == nullptr && mask == nullptr) return grouping;
  const std::string wrong = parse_grouping(mask != nullptr ? std::string("AND ") + mask : by, grouping);
  if (!wrong.empty()) fail(std::string(mask != nullptr ? "NCCL_TESTS_SPLIT_MASK: " : "NCCL_TESTS_SPLIT: ") + wrong);
  return grouping;
}

int group_size(const Grouping& grouping, int n_ranks) {
  std::map<int, int> ranks;
  for (int r = 0; r < n_ranks; r++) ranks[grouping.color(r)]++;
  std::set<int> sizes;
  for (const auto& [color, n] : ranks) sizes.insert(n);
  if (sizes.size() > 1)
    fail("NCCL_TESTS_SPLIT " + grouping.text + " makes groups of " + std::to_string(*sizes.begin()) + " and of " +
         std::to_string(*sizes.rbegin()) + " ranks: give one that makes groups of the same size");
  return *sizes.begin();
}

}  // namespace perf
