// SPDX-License-Identifier: Apache-2.0
// Options whose values have names, of the perf programs and of the command `moeccl`.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <utility>
#include <vector>

namespace perf {

template <class T>
using Named = std::vector<std::pair<std::string, T>>;

template <class T>
std::string list(const Named<T>& named) {
  std::string text;
  for (const auto& [name, value] : named) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Adds an option that takes one of the names; its help and its error list them.
template <class T>
CLI::Option* add_one_of(CLI::App* app, const std::string& option, T& value, const Named<T>& named,
                        const std::string& what) {
  const auto to_number = [named](std::string& text) -> std::string {
    for (const auto& [name, number] : named) {
      if (name != text) continue;
      text = std::to_string(static_cast<int>(number));
      return {};
    }
    return "\"" + text + "\" is not one of " + list(named);
  };
  return app->add_option(option, value, what + ": " + list(named))
      ->type_name("NAME")
      ->transform(CLI::Validator(to_number, ""));
}

}  // namespace perf
