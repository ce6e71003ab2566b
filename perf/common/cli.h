// SPDX-License-Identifier: Apache-2.0
// Command lines: options, what their values have to be, and subcommands, for the perf programs and for `moeccl`. The
// functions are named as those of CLI11, which does the work. Only cli.cc includes CLI11, because each source that does
// takes seconds more to compile.
#ifndef PERF_COMMON_CLI_H_
#define PERF_COMMON_CLI_H_

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace perf {

// Returns "" for a value that it accepts and a sentence for another one. With Option::transform it may rewrite the
// value.
struct Check {
  std::function<std::string(std::string&)> function;
  std::string shown;  // in --help, behind the option's type
};

// Accepts numbers of a range; `range` and `whole_number` only whole ones. The names of `range` in --help are CLI11's.
Check range(int least, int most);
Check within(double least, double most);
Check positive();
Check not_negative();
std::function<std::string(const std::string&)> whole_number(int64_t least, int64_t most = INT32_MAX);
Check is_member(const std::vector<std::string>& names);
Check existing_file();
// Accepts a size such as 256M and rewrites it as a number of bytes.
Check size_value();

// Its functions return the option itself, which lives as long as the App.
class Option {
 public:
  explicit Option(CLI::Option& option) : option_(option) {}
  Option* check(const Check& check);
  Option* check(const std::function<std::string(const std::string&)>& function);
  Option* transform(const Check& check);
  Option* capture_default_str();
  Option* default_str(const std::string& text);
  Option* type_name(const std::string& name);
  Option* description(const std::string& text);
  Option* delimiter(char between_values);
  Option* envname(const std::string& variable);
  Option* required();
  Option* excludes(Option* other);
  Option* needs(Option* other);
  std::string get_description() const;
  bool empty() const;  // whether the command line lacks it

 private:
  CLI::Option& option_;
};

// A program or one of its subcommands. As with getopt, the last value of a repeated option counts.
class App {
 public:
  explicit App(const std::string& description, const std::string& name = "");
  explicit App(CLI::App& subcommand);
  App(const App&) = delete;
  App& operator=(const App&) = delete;
  ~App();

  // Names are such as "-n,--iters"; one without a hyphen is positional. cli.cc lists the types that T may be.
  template <class T>
  Option* add_option(const std::string& names, T& value, const std::string& help);
  template <class T>
  Option* add_option_function(const std::string& names, const std::function<void(const T&)>& set,
                              const std::string& help);
  Option* add_flag(const std::string& names, bool& value, const std::string& help);
  void set_version_flag(const std::string& name, const std::function<std::string()>& text);
  // Options that follow show the values that their variables have now.
  void always_capture_default();
  Option* get_option(const std::string& name);
  void remove_option(const std::string& name);

  App* add_subcommand(const std::string& name, const std::string& description);
  void require_subcommand();
  bool has_subcommands() const { return !subcommands_.empty(); }
  App* find_subcommand(std::string_view name);  // nullptr where there is none

  // The function is called when the options of this command have their values. It may call refuse_option().
  void callback(const std::function<void()>& function);
  // Ends the program after --help and, with the status `bad_usage`, where the command line is wrong.
  void parse(int argc, const char* const* argv, int bad_usage);
  bool parsed() const;  // whether the command line names this subcommand
  size_t count(const std::string& name) const;

 private:
  std::unique_ptr<CLI::App> program_;  // none for a subcommand
  CLI::App& app_;
  std::list<Option> options_;
  std::list<App> subcommands_;
};

// Ends App::parse with "name: sentence".
[[noreturn]] void refuse_option(const std::string& name, const std::string& sentence);

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
Option* add_one_of(App* app, const std::string& option, T& value, const Named<T>& named, const std::string& what) {
  const auto set = [&value, named](const std::string& text) {
    for (const auto& [name, meant] : named)
      if (name == text) value = meant;
  };
  const auto check = [named](const std::string& text) -> std::string {
    for (const auto& [name, meant] : named)
      if (name == text) return "";
    return "\"" + text + "\" is not one of " + list(named);
  };
  return app->add_option_function<std::string>(option, set, what + ": " + list(named))->type_name("NAME")->check(check);
}

}  // namespace perf

#endif  // PERF_COMMON_CLI_H_
