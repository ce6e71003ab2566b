// SPDX-License-Identifier: Apache-2.0
// NCCL's lists of interfaces and devices: "eth,ib0" are all whose names begin so. "=" before the list, or before one of
// its names, makes names exact, and "^" at the beginning stands for all others: "^=docker0,lo".
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/text.h"

namespace moeccl {

struct NameList {
  struct Name {
    std::string text;
    bool exact = false;
    bool matches(std::string_view name) const { return exact ? name == text : name.starts_with(text); }
  };
  bool all_but = false;
  std::vector<Name> names;
  // Returns whether the list chooses a name; an empty list chooses all.
  bool chooses(std::string_view name) const {
    const bool named = std::any_of(names.begin(), names.end(), [&](const Name& n) { return n.matches(name); });
    return names.empty() || named != all_but;
  }

  explicit NameList(std::string_view text) {
    const auto take = [](std::string_view* from, char mark) {
      const bool there = from->starts_with(mark);
      if (there) from->remove_prefix(1);
      return there;
    };
    all_but = take(&text, '^');
    const bool all_exact = take(&text, '=');
    for (std::string_view name : comma_items(text)) {
      const bool exact = take(&name, '=') || all_exact;
      if (!name.empty()) names.push_back({std::string(name), exact});
    }
  }
};

}  // namespace moeccl
