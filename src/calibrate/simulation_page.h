// SPDX-License-Identifier: Apache-2.0
// The page that moecclSimulate returns, as text or JSON: what the caller asked, and a row for each candidate.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "moeccl/types.h"
#include "src/base/format.h"
#include "src/plan/hardware.h"
#include "src/plan/levels.h"

namespace moeccl::comm {

// One candidate's row of the page.
struct Outcome {
  std::string name;
  std::string refusal;     // not empty: why it was not simulated
  bool too_large = false;  // because it has too many steps, although it could run
  double ns = 0, dispatch_ns = 0, combine_ns = 0;
  double closed_form_ns = 0;  // HierMoE Eq. 1-6, dispatch and combine; 0: the profile has no such costs
  std::vector<uint64_t> level_bytes;
  std::vector<double> busiest_share;  // of the time, by level
  std::string path, note;
};

// Returns whether an operation's other plans are compared with the one of this name.
inline bool is_flat(std::string_view name) { return name == plan::kFlatName || name == "baseline"; }

struct SimulationPage {
  std::string title;
  plan::Hardware hardware;  // its profile includes the changes of the given file
  std::string file;         // "": none
  const plan::LevelTree& tree;
  bool moe = false;
  bool has_flat = true;  // the operation has a plan of that name
  std::vector<Outcome> outcomes;
  moecclOp_t op = moecclOpDispatch;
  std::vector<std::pair<const char*, std::string>> inputs = {};  // what the caller asked about, by JSON key, as JSON

  void refuse(std::string name, std::string why, bool too_large = false) {
    Outcome& o = outcomes.emplace_back();
    o.name = std::move(name);
    o.refusal = std::move(why);
    o.too_large = too_large;
  }
  template <class T>
  void input(const char* key, const T& value) {
    if constexpr (std::is_arithmetic_v<T>)
      inputs.emplace_back(key, format("{}", value));
    else
      inputs.emplace_back(key, json_quoted(value));
  }
  void input_list(const char* key, std::span<const int32_t> values) {
    std::string list;
    for (const int32_t v : values) list += format("{}{}", list.empty() ? "" : ", ", v);
    inputs.emplace_back(key, "[" + list + "]");
  }

  const Outcome* fastest() const;  // null: no candidate was simulated
  std::string as_text() const;
  std::string as_json() const;
};

}  // namespace moeccl::comm
