// SPDX-License-Identifier: Apache-2.0
#include "perf/common/grouping.h"

#include <strings.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "perf/common/fail.h"

namespace perf {

int Grouping::color(int rank) const {
  const auto r = static_cast<uint32_t>(rank / ranks_per_process);
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

namespace {

// Returns the number, in the notation of C or 0b, or -1 if the text is none.
int64_t parse_number(const std::string& text, int base) {
  const bool binary = base == 0 && text.starts_with("0b");
  const char* const digits = text.c_str() + (binary ? 2 : 0);
  if (text.empty() || std::isxdigit(static_cast<unsigned char>(*digits)) == 0) return -1;
  char* end = nullptr;
  errno = 0;
  const unsigned long number = std::strtoul(digits, &end, binary ? 2 : base);
  return *end == 0 && errno == 0 && number <= INT32_MAX ? static_cast<int64_t>(number) : -1;
}

}  // namespace

std::string parse_grouping(const std::string& text, Grouping& grouping) {
  constexpr struct {
    const char* name;
    char op;
  } kOps[] = {{"AND", '&'}, {"OR", '|'}, {"MOD", '%'}, {"DIV", '/'}, {"&", '&'}, {"|", '|'}, {"%", '%'}, {"/", '/'}};
  grouping.text = text;
  for (const auto& [name, op] : kOps) {
    if (strncasecmp(text.c_str(), name, std::strlen(name)) != 0) continue;
    const size_t at = text.find_first_not_of(' ', std::strlen(name));
    const int64_t number = parse_number(at == std::string::npos ? "" : text.substr(at), 0);
    if (number < (op == '%' || op == '/' ? 1 : 0)) break;
    grouping.value = static_cast<uint32_t>(number);
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
  if (mask == nullptr) {
    if (const std::string wrong = parse_grouping(by, grouping); !wrong.empty()) fail("NCCL_TESTS_SPLIT: " + wrong);
    return grouping;
  }
  const int64_t number = *mask == 0 ? 0 : parse_number(mask, 16);
  if (number < 0)
    fail(std::string("NCCL_TESTS_SPLIT_MASK is \"") + mask + "\": give a hexadecimal number, such as 0x3");
  grouping.op = '&', grouping.value = static_cast<uint32_t>(number), grouping.text = std::string("AND ") + mask;
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
