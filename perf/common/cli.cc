// SPDX-License-Identifier: Apache-2.0
#include "perf/common/cli.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <type_traits>
#include <utility>

namespace perf {
namespace {

CLI::Validator to_cli11(const Check& check) { return {check.function, check.shown}; }

Check from_cli11(const CLI::Validator& validator) {
  return {[validator](std::string& text) { return validator(text); }, validator.get_description()};
}

// Returns whether the text is a finite number.
bool is_number(const std::string& text, double& value) {
  char* end = nullptr;
  value = std::strtod(text.c_str(), &end);
  return end != text.c_str() && *end == '\0' && std::isfinite(value);
}

// CLI11's own checks name 1.8e308 in full as the largest number.
Check with_sign(bool zero_too) {
  const auto check = [zero_too](const std::string& text) -> std::string {
    double value = 0;
    if (is_number(text, value) && (value > 0 || (zero_too && value == 0))) return "";
    return "\"" + text + "\" is not a number " + (zero_too ? "from 0 on" : "above 0");
  };
  return {check, zero_too ? "NONNEGATIVE" : "POSITIVE"};
}

// CLI11 takes a number that 64 bits do not hold for the largest one that they do. Other texts are left to the option's
// own checks, whose sentences say more.
std::string unsigned_number(const std::string& text) {
  double value = 0;
  if (!is_number(text, value) || value < 0) return "";
  char* end = nullptr;
  errno = 0;
  std::strtoull(text.c_str(), &end, 0);
  if (errno == 0 && *end == '\0') return "";
  return "\"" + text + "\" is not a whole number up to " + std::to_string(UINT64_MAX);
}

// The least number of letters that turn one word into the other.
size_t letters_apart(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
    }
  }
  return row.back();
}

// Returns " (did you mean --ranks?)", or nothing where no option of the command is like this one.
std::string suggestion(const CLI::App& command, const std::string& option) {
  std::string best;
  size_t least = (option.size() - 2) / 3;  // a third of its letters may be wrong
  for (const CLI::Option* known : command.get_options())
    for (const std::string& name : known->get_lnames()) {
      const size_t apart = letters_apart(option, "--" + name);
      if (apart < least || (apart == least && best.empty())) best = "--" + name, least = apart;
    }
  return best.empty() ? "" : " (did you mean " + best + "?)";
}

// Returns a sentence about the first option that its command does not have, or nothing. CLI11 would name it last, and
// only after it has taken the option's value for a positional argument.
std::string unknown_option(const CLI::App& program, int argc, const char* const* argv) {
  const CLI::App* command = &program;
  std::string path = argv[0];
  path.erase(0, path.rfind('/') + 1);
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string word = argv[i];
    const size_t first = word.find_first_not_of('-');
    if (first == 1 || first == 2) {
      const bool number = std::isdigit(static_cast<unsigned char>(word[first])) != 0 || word[first] == '.';
      const std::string option = first == 2 ? word.substr(0, word.find('=')) : word.substr(0, 2);
      if (number || command->get_option_no_throw(option) != nullptr) continue;
      return path + ": there is no option " + option + suggestion(*command, option) + ": " + path +
             " --help lists them";
    }
    const auto named = command->get_subcommands([&](const CLI::App* below) { return below->get_name() == word; });
    if (!named.empty()) command = named[0], path += " " + word;
  }
  return "";
}

}  // namespace

Check range(int least, int most) { return from_cli11(CLI::Range(least, most)); }
Check positive() { return with_sign(false); }
Check not_negative() { return with_sign(true); }
Check is_member(const std::vector<std::string>& names) { return from_cli11(CLI::IsMember(names)); }
Check existing_file() { return from_cli11(CLI::ExistingFile); }

// CLI::Range also accepts "nan".
Check within(double least, double most) {
  char range[80];
  std::snprintf(range, sizeof range, "%g to %g", least, most);
  const auto check = [least, most, range = std::string(range)](const std::string& text) -> std::string {
    double value = 0;
    if (is_number(text, value) && value >= least && value <= most) return "";
    return "\"" + text + "\" is not a number from " + range;
  };
  return {check, range};
}

std::function<std::string(const std::string&)> whole_number(int64_t least, int64_t most) {
  return [least, most](const std::string& text) -> std::string {
    int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [last, code] = std::from_chars(text.data(), end, value);
    if (code == std::errc() && last == end && value >= least && value <= most) return "";
    return "\"" + text + "\" is not a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  };
}

Check size_value() {
  Check size = from_cli11(CLI::AsSizeValue(false));
  // CLI11 takes a negative size for the largest number.
  size.function = [bytes = size.function](std::string& text) {
    return text.starts_with('-') ? "\"" + text + "\" is negative" : bytes(text);
  };
  return size;
}

// Each returns this Option, not CLI11's.
Option* Option::check(const Check& check) { return option_.check(to_cli11(check)), this; }
Option* Option::check(const std::function<std::string(const std::string&)>& function) {
  return option_.check(function), this;
}
Option* Option::transform(const Check& check) { return option_.transform(to_cli11(check)), this; }
Option* Option::capture_default_str() { return option_.capture_default_str(), this; }
Option* Option::default_str(const std::string& text) { return option_.default_str(text), this; }
Option* Option::type_name(const std::string& name) { return option_.type_name(name), this; }
Option* Option::description(const std::string& text) { return option_.description(text), this; }
Option* Option::delimiter(char between_values) { return option_.delimiter(between_values), this; }
Option* Option::envname(const std::string& variable) { return option_.envname(variable), this; }
Option* Option::required() { return option_.required(), this; }
Option* Option::excludes(Option* other) { return option_.excludes(&other->option_), this; }
Option* Option::needs(Option* other) { return option_.needs(&other->option_), this; }
std::string Option::get_description() const { return option_.get_description(); }
bool Option::empty() const { return option_.empty(); }

App::App(const std::string& description, const std::string& name)
    : program_(std::make_unique<CLI::App>(description, name)), app_(*program_) {
  app_.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}
App::App(CLI::App& subcommand) : app_(subcommand) {}
App::~App() = default;

template <class T>
Option* App::add_option(const std::string& names, T& value, const std::string& help) {
  CLI::Option* const option = app_.add_option(names, value, help);
  if constexpr (std::is_same_v<T, uint64_t> || std::is_same_v<T, std::vector<uint64_t>>) option->check(unsigned_number);
  return &options_.emplace_back(*option);
}
template <class T>
Option* App::add_option_function(const std::string& names, const std::function<void(const T&)>& set,
                                 const std::string& help) {
  return &options_.emplace_back(*app_.add_option_function<T>(names, set, help));
}

using Text = const std::string&;
template Option* App::add_option(Text, bool&, Text);
template Option* App::add_option(Text, int&, Text);
template Option* App::add_option(Text, int64_t&, Text);
template Option* App::add_option(Text, uint64_t&, Text);
template Option* App::add_option(Text, double&, Text);
template Option* App::add_option(Text, std::string&, Text);
template Option* App::add_option(Text, std::vector<int>&, Text);
template Option* App::add_option(Text, std::vector<uint64_t>&, Text);
template Option* App::add_option(Text, std::vector<double>&, Text);
template Option* App::add_option(Text, std::vector<std::string>&, Text);
template Option* App::add_option_function(Text, const std::function<void(const int&)>&, Text);
template Option* App::add_option_function(Text, const std::function<void(const std::string&)>&, Text);

Option* App::add_flag(const std::string& names, bool& value, const std::string& help) {
  return &options_.emplace_back(*app_.add_flag(names, value, help));
}
void App::set_version_flag(const std::string& name, const std::function<std::string()>& text) {
  app_.set_version_flag(name, text);
}
void App::always_capture_default() { app_.option_defaults()->always_capture_default(); }
Option* App::get_option(const std::string& name) { return &options_.emplace_back(*app_.get_option(name)); }
void App::remove_option(const std::string& name) { app_.remove_option(app_.get_option(name)); }

App* App::add_subcommand(const std::string& name, const std::string& description) {
  return &subcommands_.emplace_back(*app_.add_subcommand(name, description));
}
void App::require_subcommand() { app_.require_subcommand(1); }
App* App::find_subcommand(std::string_view name) {
  for (App& subcommand : subcommands_)
    if (subcommand.app_.get_name() == name) return &subcommand;
  return nullptr;
}

void App::callback(const std::function<void()>& function) { app_.callback(function); }
void App::parse(int argc, const char* const* argv, int bad_usage) {
  try {
    app_.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const std::string unknown = error.get_exit_code() == 0 ? "" : unknown_option(app_, argc, argv);
    if (unknown.empty()) std::exit(app_.exit(error) == 0 ? 0 : bad_usage);
    std::fprintf(stderr, "%s\n", unknown.c_str());
    std::exit(bad_usage);
  }
}
bool App::parsed() const { return app_.parsed(); }
size_t App::count(const std::string& name) const { return app_.count(name); }

void refuse_option(const std::string& name, const std::string& sentence) { throw CLI::ValidationError(name, sentence); }

}  // namespace perf
