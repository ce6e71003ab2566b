// SPDX-License-Identifier: Apache-2.0
// Options whose values have names or a sign, of the perf programs and of the command `moeccl`.
#pragma once

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
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
      ->transform(CLI::Validator(to_number, ""))
      ->default_str("");  // a captured one is a number
}

// Returns whether the text is a finite number.
inline bool is_number(const std::string& text, double& value) {
  char* end = nullptr;
  value = std::strtod(text.c_str(), &end);
  return end != text.c_str() && *end == '\0' && std::isfinite(value);
}

// Accepts numbers above 0, or from 0 on. CLI11's own checks name 1.8e308 in full as the largest number.
inline CLI::Validator with_sign(bool zero_too) {
  const auto check = [zero_too](std::string& text) -> std::string {
    double value = 0;
    if (is_number(text, value) && (value > 0 || (zero_too && value == 0))) return {};
    return "\"" + text + "\" is not a number " + (zero_too ? "from 0 on" : "above 0");
  };
  return {check, zero_too ? "NONNEGATIVE" : "POSITIVE"};
}
inline CLI::Validator positive() { return with_sign(false); }
inline CLI::Validator not_negative() { return with_sign(true); }
// Accepts numbers in a range. CLI::Range also accepts "nan".
inline CLI::Validator within(double low, double high) {
  char range[80];
  std::snprintf(range, sizeof range, "%g to %g", low, high);
  const auto check = [low, high, range = std::string(range)](std::string& text) -> std::string {
    double value = 0;
    if (is_number(text, value) && value >= low && value <= high) return {};
    return "\"" + text + "\" is not a number from " + range;
  };
  return {check, range};
}
// Refuses what CLI::AsSizeValue takes for the largest number. CLI11 runs the last transform() first.
inline CLI::Validator no_minus_sign() {
  const auto check = [](std::string& text) -> std::string {
    return text.starts_with('-') ? "\"" + text + "\" is negative" : std::string();
  };
  return {check, ""};
}

}  // namespace perf
